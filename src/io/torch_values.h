/* What the values of a PyTorch pickle mean: storages, tensors, and the tree that holds them. */
#ifndef MUI_TORCH_VALUES_H
#define MUI_TORCH_VALUES_H

#include "io/pickle.h"
#include "io/torch_dtype.h"

#define MUI_MAX_FILE_DIMS 64
#define MUI_MAX_KEY_BYTES 1024  /* of a storage; they are numbers */
#define MUI_MAX_PLACE_BYTES 64

/* Of a blob's numbers: what the file as a whole says, or what NumPy's type says. */
typedef enum mui_order { MUI_ORDER_OF_FILE = 0, MUI_ORDER_LITTLE, MUI_ORDER_BIG } mui_order;

/* The bytes behind one storage key: a zip member, or a stretch of a legacy file. */
typedef struct mui_blob {
    const char *key;
    const mui_torch_dtype *dtype; /* NULL until the pickle refers to it */
    bool untyped;
    int64_t elements;
    const unsigned char *data;    /* legacy and safetensors files; NULL in zips */
    struct mui_zip_member *member; /* zips */
    struct mu_checkpoint_file *shard; /* of a sharded checkpoint: the file that has it; NULL: the one that was opened */
    mui_order order;
    uint32_t inflations;          /* how often it was inflated */
    void *inflated;               /* kept, after it was wanted in turns with others; see blob_data */
} mui_blob;

/* One reference to a storage, in order of mui_pickle.persistent. blob NULL: a class, not a storage. */
typedef struct mui_storage_ref {
    mui_blob *blob;
    mui_value *class_value;        /* of ('module', class, ...) */
    const mui_torch_dtype *dtype;
    int64_t offset, elements;      /* the part of the blob it stands for */
    mui_slice location;
    const char *place;             /* the location as text, at most MUI_MAX_PLACE_BYTES of it */
} mui_storage_ref;

typedef enum mui_role { MUI_NO_ROLE = 0, MUI_PARAMETER, MUI_BUFFER } mui_role;

/* Room for the axes of one tensor while it is read. */
typedef struct mui_axes {
    int64_t dim[MUI_MAX_FILE_DIMS], stride[MUI_MAX_FILE_DIMS];
} mui_axes;

/* A tensor as the file describes it: a view of a storage. */
typedef struct mui_file_tensor {
    const mui_storage_ref *storage; /* NULL: no data (meta, sparse) */
    const mui_torch_dtype *dtype;   /* NULL: not known */
    int ndim;
    int64_t *dim, *stride;          /* ndim of each, not owned */
    int64_t offset;                 /* in elements, of the storage reference */
    bool conjugate, negative;       /* to be done on reading */
    bool bare_storage;
    bool array;                     /* NumPy's */
    const mui_value *quantizer;     /* (scheme, scale, zero point) or (scheme, scales, zero points, axis); NULL: none */
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
    mui_arena *arena;             /* for what values need beside the pickle, and how much work that was; set while a */
    size_t *work;                 /* tree is built */
} mui_meaning;

/* If v is a tensor constructor's record: *out. What is wrong with a broken one goes into problem, without its name, which
 * the caller knows. Parameters and other wrappers are seen through: *inner is then the value to look at, and
 * out's role and requires_grad are the wrapper's. out's axes are in room. */
typedef enum mui_tensor_verdict { MUI_NOT_TENSOR, MUI_IS_TENSOR, MUI_WRAPS, MUI_BROKEN } mui_tensor_verdict;
mui_tensor_verdict mui_tensor_read(const mui_meaning *w, const mui_value *v, mui_axes *room, mui_file_tensor *out,
                                   mui_value **inner, char *problem, size_t problem_bytes);
/* A copy that has its own axes, as many as it needs: a file may have a million tensors. NULL with the error raised. */
mui_file_tensor *mui_file_tensor_keep(mui_arena *a, const mui_file_tensor *t);

/* A tuple of sizes; false with the problem in words. */
bool mui_shape_read(const mui_value *v, int64_t *dim, int *ndim, char *problem, size_t problem_bytes);

#endif
