/* What the values of a PyTorch pickle mean: storages, tensors, and the tree that holds them. */
#ifndef MUI_TORCH_VALUES_H
#define MUI_TORCH_VALUES_H

#include "io/pickle.h"
#include "io/torch_dtype.h"

#define MUI_MAX_FILE_DIMS 64

/* The bytes behind one storage key: a zip member, or a stretch of a legacy file. */
typedef struct mui_blob {
    const char *key;
    const mui_torch_dtype *dtype; /* NULL until the pickle refers to it */
    bool untyped;
    int64_t elements;
    const unsigned char *data;    /* legacy and safetensors files; NULL in zips */
    struct mui_zip_member *member; /* zips */
    struct mu_checkpoint_file *shard; /* of a sharded checkpoint: the file that has it; NULL: the one that was opened */
} mui_blob;

/* One reference to a storage, in order of mui_pickle.persistent. blob NULL: a class, not a storage. */
typedef struct mui_storage_ref {
    mui_blob *blob;
    mui_value *class_value;        /* of ('module', class, ...) */
    const mui_torch_dtype *dtype;
    int64_t offset, elements;      /* the part of the blob it stands for */
    mui_slice location;
} mui_storage_ref;

typedef enum mui_role { MUI_NO_ROLE = 0, MUI_PARAMETER, MUI_BUFFER } mui_role;

/* A tensor as the file describes it: a view of a storage. */
typedef struct mui_file_tensor {
    const mui_storage_ref *storage; /* NULL: no data (meta, sparse) */
    const mui_torch_dtype *dtype;   /* NULL: not known */
    int ndim;
    int64_t dim[MUI_MAX_FILE_DIMS], stride[MUI_MAX_FILE_DIMS];
    int64_t offset;                 /* in elements, of the storage reference */
    bool conjugate, negative;       /* to be done on reading */
    bool bare_storage;
    mui_role role;
    bool requires_grad;
    const char *note;               /* why it is not an ordinary tensor; NULL: it is */
} mui_file_tensor;

/* Reads the tuple of a persistent id. find returns the blob of a key, NULL when there is none. */
typedef mui_blob *(*mui_find_blob_fn)(void *user, mui_slice key);
mu_status mui_storage_ref_read(mu_context *c, const char *path, const mui_value *id, bool legacy,
                               mui_find_blob_fn find, void *user, mui_storage_ref *out) MU_MUST_USE;

/* What stands between a file and the meaning of its values. */
typedef struct mui_meaning {
    mu_context *context;
    const char *path;
    const mui_storage_ref *refs;  /* by number of the persistent value */
} mui_meaning;

/* If v is a tensor constructor's record: *is and *out. Errors do not say which tensor: the caller's place in the tree
 * does, through describe. Parameters and other wrappers are seen through: *inner is then the value to look at, and
 * out's role and requires_grad are the wrapper's. */
typedef enum mui_tensor_verdict { MUI_NOT_TENSOR, MUI_IS_TENSOR, MUI_WRAPS, MUI_BROKEN } mui_tensor_verdict;
mui_tensor_verdict mui_tensor_read(const mui_meaning *w, const mui_value *v, mui_file_tensor *out, mui_value **inner,
                                   char *problem, size_t problem_bytes);

#endif
