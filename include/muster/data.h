/* Data sets, sampling over ranks, and loading by threads.
 *
 * Results never depend on the number of loader threads: augmentation draws from (seed, epoch, sample index).
 *
 * How an epoch is cut: the order is 0, 1, 2, ... or, with shuffle, a permutation of (seed, epoch) that all ranks
 * compute alike. Step s takes the run of batch * size positions from s * batch * size on, the global batch; rank r
 * takes positions r * batch to (r + 1) * batch of that run. So `size` ranks with batch B see, together and in rank
 * order, exactly what one rank with batch size * B sees. The last run may be shorter: it is cut into size contiguous
 * parts as equal as can be, the first ranks having one sample more. */
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
    bool skip_bad;       /* image folders: an unreadable image is logged and counted once, and left out of its batch;
                            default: an error that names it */
} mu_dataset_options;

/* MNIST's format: {train,t10k}-{images-idx3,labels-idx1}-ubyte, plain or .gz, in dir. Kept in memory as bytes, read as
 * byte / 255. As many classes as the largest label asks for. Owned by the context, as all data sets. */
MU_API mu_dataset *mu_idx_dataset(mu_context *c, const char *dir, const mu_dataset_options *options);
/* CIFAR-10 binary (data_batch_1..5.bin, test_batch.bin) or CIFAR-100 binary (train.bin, test.bin, fine labels). In
 * memory as bytes, as above. Class names are read from batches.meta.txt or fine_label_names.txt where it is there. */
MU_API mu_dataset *mu_cifar_dataset(mu_context *c, const char *dir, const mu_dataset_options *options);
/* dir/<class>/<image>.{jpg,jpeg,png}, classes in byte order of their names. With dir/train and dir/test (or dir/val)
 * present, the split chooses and the classes are those of dir/train, so that labels agree; otherwise both splits are
 * all images. A class without images is an error. Images are read anew each time: alpha is dropped, 16 bits become 8,
 * one channel means luma, EXIF rotation is ignored (as torchvision does), damage is an error, and so are images over
 * 65500 pixels a side or 100 million in all. Resized bilinearly with antialiasing: shorter side to `side`, centre
 * crop; equal to torchvision's Resize and CenterCrop on Pillow images. */
MU_API mu_dataset *mu_image_folder(mu_context *c, const char *dir, const mu_dataset_options *options);
/* "idx:DIR", "cifar:DIR" or "folder:DIR". */
MU_API mu_dataset *mu_dataset_open(mu_context *c, const char *spec, const mu_dataset_options *options);

/* A data set of the user's own. get writes sample i as dims floats in [0, 1] or any scale and its label; it is called
 * from loader threads, several at a time, and must not call into Muster. destroy is called when the context closes,
 * and also when mu_dataset_new fails. */
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
MU_API int64_t mu_dataset_bad(const mu_dataset *d); /* distinct images left out so far, with skip_bad */
/* One sample, unaugmented and unnormalised: x holds the product of mu_dataset_dims floats. Not from several threads at
 * once. A bad image is an error here, whatever skip_bad says. */
MU_API mu_status mu_dataset_get(mu_dataset *d, int64_t i, float *x, int64_t *label) MU_MUST_USE;

typedef enum mu_remainder {
    MU_REMAINDER_DEFAULT = 0, /* uneven: every sample exactly once; in the last step ranks may differ by one sample, and
                                 some may have none (mu_ddp_backward takes NULL loss, and weights) */
    MU_REMAINDER_WRAP,        /* as PyTorch's DistributedSampler: the first samples again, so ranks have equal counts */
    MU_REMAINDER_DROP         /* only full batches on all ranks; none at all is an error of mu_loader_open */
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
                               zeros, before normalising, as in torchvision. Samples that are not of 3 dimensions
                               count as one channel */
} mu_loader_options;
/* Owned by the context. Threads start at the first rewind. NULL on error. */
MU_API mu_loader *mu_loader_open(mu_dataset *d, const mu_loader_options *options);
/* At any time, also in the middle of an epoch: ends the threads, which takes as long as one sample. NULL is allowed. */
MU_API void mu_loader_close(mu_loader *l);

typedef struct mu_batch {
    mu_tensor *x;           /* (samples, dims...) */
    mu_tensor *y;           /* (samples) MU_I64 */
    int64_t samples;        /* of this rank in this batch; 0 for a rank with nothing while others have some */
    int64_t total_samples;  /* over all ranks in this step, known without communication; images that skip_bad leaves out
                               are still counted here */
    const int64_t *indices; /* samples indices into the data set, valid until the next call on the loader */
} mu_batch;
/* Starts the epoch at step `first` (0 unless resuming), whatever came before: what follows is what an unbroken epoch
 * would give from there on. */
MU_API mu_status mu_loader_rewind(mu_loader *l, int64_t epoch, int64_t first) MU_MUST_USE;
/* The same from any position of the epoch's order: after `samples` of them, all ranks' together, whatever number of ranks
 * and batch had them. What is left is cut into global batches from there on, so that none comes twice and none is left
 * out. mu_loader_rewind(l, e, s) is mu_loader_seek(l, e, s * batch * size). MU_ERR_ARG beyond the end. */
MU_API mu_status mu_loader_seek(mu_loader *l, int64_t epoch, int64_t samples) MU_MUST_USE;
/* That position after the batch given out last, of all ranks together: what a checkpoint keeps. */
MU_API int64_t mu_loader_position(const mu_loader *l);
/* Steps that this epoch still has, equal on all ranks; 0 before the first rewind. */
MU_API int64_t mu_loader_steps_left(const mu_loader *l);
/* Next batch, its tensors on the tape, copied from the loader's memory; blocks until it is loaded. False at the end
 * of the epoch or on error (mu_context_status tells). An error in a loader thread is raised here, when its batch's turn
 * comes. All ranks get the same number of true returns per epoch: a rank without samples gets samples 0 and x, y
 * NULL. */
MU_API bool mu_loader_next(mu_loader *l, mu_tape *t, mu_batch *out);
/* Steps in an epoch, equal on all ranks. */
MU_API int64_t mu_loader_steps(const mu_loader *l);

#ifdef __cplusplus
}
#endif
#endif
