/* Data sets, sampling over ranks, and loading by threads.
 *
 * Results never depend on the number of loader threads: augmentation draws from (seed, epoch, sample index). */
#ifndef MUSTER_DATA_H
#define MUSTER_DATA_H

#include <muster/group.h>
#include <muster/tape.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mu_dataset mu_dataset;
typedef struct mu_loader mu_loader;

typedef enum mu_split { MU_SPLIT_TRAIN = 0, MU_SPLIT_TEST } mu_split;

typedef struct mu_dataset_options {
    mu_split split;
    int first_classes;   /* keep only samples with label < first_classes; 0: all */
    int side;            /* image folders: height and width after resizing; 0: 224. Others: their own size */
    int channels;        /* image folders: 3 (default) or 1 */
    bool skip_bad;       /* an unreadable image is logged, counted and left out of its batch; default: an error */
} mu_dataset_options;

/* MNIST's format: {train,t10k}-{images-idx3,labels-idx1}-ubyte, plain or .gz, in dir. Owned by the context. */
MU_API mu_dataset *mu_idx_dataset(mu_context *c, const char *dir, const mu_dataset_options *options);
/* CIFAR-10 binary (data_batch_1..5.bin, test_batch.bin) or CIFAR-100 binary (train.bin, test.bin, fine labels). */
MU_API mu_dataset *mu_cifar_dataset(mu_context *c, const char *dir, const mu_dataset_options *options);
/* dir/<class>/<image>.{jpg,jpeg,png}, classes in byte order of their names; with dir/train and dir/test (or dir/val)
 * present, the split chooses. Resized bilinearly with antialiasing: shorter side to `side`, centre crop. */
MU_API mu_dataset *mu_image_folder(mu_context *c, const char *dir, const mu_dataset_options *options);
/* "idx:DIR", "cifar:DIR" or "folder:DIR". */
MU_API mu_dataset *mu_dataset_open(mu_context *c, const char *spec, const mu_dataset_options *options);

/* A data set of the user's own. get writes sample i as dims floats in [0, 1] or any scale and its label; it is called
 * from loader threads, several at a time. */
typedef struct mu_dataset_source {
    int64_t count;
    mu_dims dims; /* of one sample */
    int classes;
    mu_status (*get)(void *user, int64_t i, float *x, int64_t *label);
    void (*destroy)(void *user); /* may be NULL */
    void *user;
} mu_dataset_source;
MU_API mu_dataset *mu_dataset_new(mu_context *c, const mu_dataset_source *source);

MU_API int64_t mu_dataset_count(const mu_dataset *d);
MU_API int mu_dataset_classes(const mu_dataset *d);
MU_API mu_dims mu_dataset_dims(const mu_dataset *d); /* of one sample, e.g. (1, 28, 28) */
MU_API const char *mu_dataset_class_name(const mu_dataset *d, int label); /* "" if it has none */
MU_API int64_t mu_dataset_bad(const mu_dataset *d); /* images skipped so far, with skip_bad */
/* One sample, unaugmented and unnormalised: x holds the product of mu_dataset_dims floats. */
MU_API mu_status mu_dataset_get(mu_dataset *d, int64_t i, float *x, int64_t *label) MU_MUST_USE;

typedef enum mu_remainder {
    MU_REMAINDER_DEFAULT = 0, /* uneven: every sample exactly once; some ranks may get one batch fewer or a smaller
                                 one (mu_ddp_backward takes NULL loss, and weights) */
    MU_REMAINDER_WRAP,        /* as PyTorch's DistributedSampler: the first samples again, so ranks have equal counts */
    MU_REMAINDER_DROP         /* only full batches on all ranks */
} mu_remainder;

typedef struct mu_loader_options {
    int batch;              /* samples per rank and step; 0: 32 */
    mu_shard shard;         /* mu_group_shard(group); the default is everything */
    mu_remainder remainder;
    bool shuffle;           /* a permutation of (seed, epoch), the same on all ranks */
    uint64_t seed;          /* 0: the context's */
    int threads;            /* loader threads; 0: 1; negative: none, load in the calling thread */
    int prefetch;           /* batches ready ahead; 0: 2 */
    int crop_padding;       /* pad by so many zeros and crop at random back to size; 0: none */
    bool flip;              /* mirror left-right with probability 1/2 */
    float mean[4], std[4];  /* normalise per channel (x - mean) / std after augmentation; std 0: 1. Padding is of raw
                               zeros, before normalising, as in torchvision */
} mu_loader_options;
MU_API mu_loader *mu_loader_open(mu_dataset *d, const mu_loader_options *options);
MU_API void mu_loader_close(mu_loader *l);

typedef struct mu_batch {
    mu_tensor *x;           /* (samples, dims...) */
    mu_tensor *y;           /* (samples) MU_I64 */
    int64_t samples;        /* of this rank in this batch; 0 for a rank with nothing while others have some */
    int64_t total_samples;  /* over all ranks in this step, known without communication */
    const int64_t *indices; /* samples indices into the data set, valid until the next call */
} mu_batch;
/* Starts the epoch at batch `first` (0 unless resuming). */
MU_API mu_status mu_loader_rewind(mu_loader *l, int64_t epoch, int64_t first) MU_MUST_USE;
/* Next batch, its tensors on the tape; false at the end of the epoch or on error (mu_context_status tells). All ranks
 * get the same number of true returns per epoch: a rank without samples left gets samples 0 and x, y NULL. */
MU_API bool mu_loader_next(mu_loader *l, mu_tape *t, mu_batch *out);
/* Steps in an epoch, equal on all ranks. */
MU_API int64_t mu_loader_steps(const mu_loader *l);

#ifdef __cplusplus
}
#endif
#endif
