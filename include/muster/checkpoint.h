/* Checkpoints: PyTorch's zip and legacy files, read by an inert reader that runs nothing, and written so that old and
 * new PyTorch load them with weights_only=True; safetensors. */
#ifndef MUSTER_CHECKPOINT_H
#define MUSTER_CHECKPOINT_H

#include <muster/module.h>
#include <muster/optim.h>
#include <muster/group.h>

#ifdef __cplusplus
extern "C" {
#endif

struct mu_checkpoint_options;

typedef struct mu_load_options {
    bool not_strict;          /* missing and unexpected names are reported, not an error */
    bool skip_mismatched;     /* wrong shapes are skipped and named; default: an error, also when not strict */
    const char *key;          /* path of the state dict inside the file, e.g. "state_dict"; NULL: found by itself */
    mu_group *group;          /* rank 0 reads, the others receive; errors reach all. Collective when given */
    /* Rules "FROM=TO" for the file's names, NULL-terminated: every match of the POSIX extended regular expression FROM
     * becomes TO, in which \1 to \9 are its groups and \0 is all of it; \= in FROM is a =. Applied in order, before
     * wrappers' names are looked for. A rule that matches nothing is warned of. */
    const char *const *rename;
    bool exact_names;         /* no wrapper's name is removed or added */
    const struct mu_checkpoint_options *file; /* limits, how to read; NULL: the defaults */
} mu_load_options;

/* What a load did. Text belongs to the context and is valid until its next load. */
typedef struct mu_load_report {
    int64_t loaded, missing, unexpected, mismatched; /* tensors; tied to a loaded one is loaded */
    const char *prefix_removed; /* "" if none; e.g. "module." */
    const char *prefix_added;   /* "" if none */
    const char *text;           /* several lines for people: names of everything missing, unexpected, mismatched */
    int64_t converted;          /* of those loaded: of another type in the file */
    int64_t renamed;            /* of those loaded: by another name in the file, below the state dict */
    int64_t elements, elements_loaded; /* of the model's parameters and buffers, tied ones once */
} mu_load_report;

/* Loads parameters and buffers by name. All or nothing: on error, root is as it was; a checksum that is
 * wrong is found before anything is written. Only a group that breaks while the data is on its way (a rank dies) leaves
 * a mixture behind: load again. Takes little memory beyond the model's, whatever the size of the file: data goes
 * straight from the mapped file into the model (what the zip deflated is unpacked first). Names that wrappers put between
 * ("module.", "_orig_mod.", "model.", "net.", at the start or inside, in the file or in the model) are removed or added
 * where that makes more names match, and the report says so. No match at all is MU_ERR_FORMAT, and so are names missing
 * on either side unless not_strict; other shapes are MU_ERR_SHAPE unless skip_mismatched; less than half of the elements
 * is warned of. docs/semantics.md has all rules. report may be NULL. */
MU_API mu_status mu_load(mu_module *root, const char *path, const mu_load_options *options, mu_load_report *report);

typedef enum mu_file_format {
    MU_FORMAT_TORCH = 0,   /* torch.save's zip, since PyTorch 1.6 */
    MU_FORMAT_LEGACY,      /* torch.save before that, or with _use_new_zipfile_serialization=False */
    MU_FORMAT_SAFETENSORS  /* has no ties and no versions of modules: of tied weights one name is written, and the others
                              are recorded in __metadata__ as safetensors.torch.save_model does */
} mu_file_format;

typedef struct mu_save_options {
    const char *prefix; /* put before every name, e.g. "module."; NULL: none */
    mu_file_format format;
} mu_save_options;
/* Writes a state dict, atomically: path is either the old file or the whole new one, also when the disk is full or the
 * process is killed. Names must be UTF-8 and at most 4090 bytes long, since no reader would take others. Not collective: in
 * a group, one rank does it. */
MU_API mu_status mu_save(mu_module *root, const char *path, const mu_save_options *options) MU_MUST_USE;

/* How much a file may ask for, and how it is read; 0: the default. A file that asks for more is refused with
 * MU_ERR_LIMIT, before the memory is taken. docs/checkpoints.md says what reading costs within the limits. */
typedef struct mu_checkpoint_options {
    int64_t max_pickle_bytes;  /* of the pickled object, after inflating; 512 MiB */
    int64_t max_members;       /* of a zip; 1,000,000 */
    int64_t max_header_bytes;  /* of safetensors' JSON and index files; 100,000,000 */
    int64_t max_tensor_bytes;  /* of a tensor laid out row by row; this machine's memory */
    int64_t max_inflate_ratio; /* of a zip member that inflates to more than 256 MiB; 100 */
    bool no_checksum;          /* the checksums of a zip's members are not verified */
    bool big_endian;           /* how to read a zip that does not say (written on s390x before PyTorch 2.1) */
} mu_checkpoint_options;

/* Training state: {"model": state dict, "optimizer": as torch.optim's state_dict, "epoch", "step", "seed", ...}.
 *
 * That is all there is: schedules are functions of the step, and random streams (order, augmentation, dropout) have no
 * state, they are drawn from the seed with the epoch, the sample or the step, and for dropout the rank. So the same
 * number of ranks goes on bit for bit, and another number with the same order and augmentation. */
typedef struct mu_training {
    mu_module *model;
    mu_optimizer *optimizer; /* NULL: none is read or written */
    int64_t epoch;           /* the epoch to go on with */
    int64_t step_in_epoch;   /* steps of it already done */
    int64_t step;            /* optimiser steps done in all */
    int64_t samples_in_epoch; /* samples of it already taken by all ranks together, for mu_loader_seek on another number of
                                 ranks. After a load of a file that does not say so: -1 */
    uint64_t seed;
    const char *note;        /* free text kept in the file (the command keeps its options there); NULL: none. After a
                                load it belongs to the context, until the next load */
} mu_training;
/* Atomic and not collective, as mu_save; but collective where the optimiser shares its state (mu_sgd_options.shard): all
 * ranks of that group call it with equal arguments, rank 0 writes, and all return the same. */
MU_API mu_status mu_training_save(const mu_training *state, const char *path) MU_MUST_USE;
/* Fills model and optimizer in place and the numbers. group as in mu_load_options. Into an optimiser that shares its state
 * all ranks load, with group or without. */
MU_API mu_status mu_training_load(mu_training *state, const char *path, mu_group *group) MU_MUST_USE;

/* Training files of others have their state under many names: {"state_dict", "optimizer", "epoch"},
 * {"model_state_dict", "optimizer_state_dict"}, {"net", "optim"}, Lightning's {"state_dict", "optimizer_states": [...]}.
 * What has "state" and "param_groups" is an optimiser's state_dict wherever it is; the model is found as by mu_load.
 * Of the numbers, "epoch" is taken as it is (some programs write the last one done, others the next: see to it), step
 * from "step", "global_step" or Adam's own count; what is not there is 0, the seed stays, and a warning says so. */
typedef struct mu_training_options {
    mu_load_options model;     /* key NULL: "model" if the file has it, else found by itself. group: of the whole load */
    const char *optimizer_key; /* which optimiser, e.g. "optimizer_states[0]"; NULL: the only one, else an error that
                                  lists them */
    bool file_settings;        /* momentum, betas, eps, weight decay are the file's from then on, as after torch's
                                  load_state_dict. Default: they stay the program's, and a warning names what differs.
                                  Learning rates are the file's either way, group by group */
} mu_training_options;
/* mu_training_load with options; NULL: none. The report may be NULL, and is the model's. */
MU_API mu_status mu_training_load_with(mu_training *state, const char *path, const mu_training_options *options,
                                       mu_load_report *report) MU_MUST_USE;

/* An optimiser's state alone, from torch.optim's state_dict, wherever in the file it is; all or nothing. Of SGD, Adam and
 * AdamW; what would go on with other arithmetic (amsgrad, maximize, any other optimiser) is MU_ERR_UNSUPPORTED by name.
 *
 * Which parameter is which: the file numbers them, or has them by ids that Python objects once had, group by group in
 * the order in which the model had them; newer PyTorch may name them (optimisers of named_parameters()). With a model
 * in the same file its names' order counts, else the order in which this model's parameters were registered. Groups
 * must be as many and of the same sizes and shapes; in another order they are found when only one way fits. Parameters
 * that are frozen here may be left out of the file. One without state begins anew. */
typedef struct mu_optimizer_load_options {
    const char *key;           /* as optimizer_key above */
    bool file_settings;        /* as above */
    mu_group *group;           /* rank 0 reads, the others receive; errors reach all. Collective when given */
    const mu_checkpoint_options *file;
} mu_optimizer_load_options;
MU_API mu_status mu_optimizer_load(mu_optimizer *o, const char *path,
                                   const mu_optimizer_load_options *options) MU_MUST_USE;

typedef struct mu_optimizer_save_options {
    bool trainable_only; /* frozen parameters are left out and not counted, for a PyTorch program that made its optimiser
                            of those that require a gradient; default: all are counted, as of model.parameters() */
} mu_optimizer_save_options;
/* Writes torch.optim's state_dict alone, for optimizer.load_state_dict(torch.load(path)). Atomic, as mu_save; collective
 * where mu_training_save is. */
MU_API mu_status mu_optimizer_save(mu_optimizer *o, const char *path,
                                   const mu_optimizer_save_options *options) MU_MUST_USE;
/* mu_training_save with options for the optimiser's part. */
MU_API mu_status mu_training_save_with(const mu_training *state, const char *path,
                                       const mu_optimizer_save_options *options) MU_MUST_USE;

/* Any file, for looking into it. Not collective: each rank may open its own. Indices of entries go from 0 to
 * mu_checkpoint_count. Texts and arrays that come from a checkpoint belong to it, until it is closed. */
typedef struct mu_checkpoint_file mu_checkpoint_file;
typedef struct mu_checkpoint_entry {
    const char *name;        /* path in the file's object, joined by dots: "state_dict.conv1.weight" */
    mu_dtype dtype;          /* as mu_checkpoint_read gives the elements; where Muster lacks the type, one that has room for
                                its bits */
    const char *dtype_name;  /* PyTorch's, also for types Muster cannot compute with */
    mu_dims dims;            /* of more than MU_MAX_DIMS: none, and a note */
    const char *tied_to;     /* name of an earlier entry with the same storage and view, or NULL */
    const char *note;        /* why it cannot be loaded into a model, e.g. "sparse: cannot be read"; NULL: it can be */
    const char *location;    /* where PyTorch had it: "cpu", "cuda:0"; "" when the file does not say */
    bool is_array;           /* not a tensor but a NumPy array or scalar */
    bool is_storage;         /* not a tensor but a bare storage, seen as one dimension */
    bool is_parameter;       /* the file says so: a pickled module and a pickled Parameter do, a state dict's tensors do */
    bool is_buffer;          /* not; then both are false */
    bool requires_grad;      /* as the file has it: a state dict's tensors are detached, and it is false there */
} mu_checkpoint_entry;
/* The file is mapped: while it is open here or being loaded, it may be replaced (as mu_save does) but not shortened in
 * place. Owned by the context: closing that closes it too. NULL with MU_ERR_IO if it cannot be opened, with MU_ERR_FORMAT
 * saying what the file is if it is no checkpoint or is damaged, with MU_ERR_LIMIT if it asks for too much. */
MU_API mu_checkpoint_file *mu_checkpoint_open(mu_context *c, const char *path);
/* The same with options; NULL: the defaults. */
MU_API mu_checkpoint_file *mu_checkpoint_open_with(mu_context *c, const char *path,
                                                   const mu_checkpoint_options *options);
MU_API void mu_checkpoint_close(mu_checkpoint_file *k); /* NULL is allowed */
MU_API const char *mu_checkpoint_format(const mu_checkpoint_file *k); /* "torch zip", "torch legacy", ... */
MU_API int64_t mu_checkpoint_count(const mu_checkpoint_file *k);
/* Where there is no entry i: an empty name, no dimensions. */
MU_API mu_checkpoint_entry mu_checkpoint_get(const mu_checkpoint_file *k, int64_t i);
/* The elements of entry i, row-major, little-endian, bytes = elements times mu_dtype_bytes. out NULL: only checks that
 * it can be read, and that it is not larger than max_tensor_bytes (a file may claim 2^40 elements over 4 bytes), which is
 * MU_ERR_LIMIT. Without data (sparse, meta) it is MU_ERR_UNSUPPORTED, damaged MU_ERR_FORMAT; another number of bytes, or no
 * entry i, MU_ERR_ARG. */
MU_API mu_status mu_checkpoint_read(mu_checkpoint_file *k, int64_t i, void *out, size_t bytes) MU_MUST_USE;
/* The same elements where they are in the mapped file, to be read only, until it is closed. NULL without an error when
 * they are not there as mu_checkpoint_read gives them: deflated, strided, of the other byte order, or not aligned for
 * their type; NULL with one when they cannot be read at all. Verifies the checksum once, as reading does, which is a pass
 * over the data, unless the file was opened with no_checksum. */
MU_API const void *mu_checkpoint_data(mu_checkpoint_file *k, int64_t i);
/* How a quantised tensor's integers become numbers: (integer - zero point) * scale, one pair for the whole tensor or one
 * for each index of a dimension. */
typedef struct mu_quantization {
    const char *scheme;        /* "per_tensor_affine", "per_channel_affine", ...; NULL: the entry is not quantised */
    int axis;                  /* the dimension; -1: the whole tensor */
    int64_t count;             /* of scales and of zero points: 1, or the size of that dimension */
    const double *scales, *zero_points; /* [count], owned by the checkpoint */
} mu_quantization;
/* Each call reads them anew and keeps them until the file is closed. MU_ERR_FORMAT if they are not what the tensor
 * needs, MU_ERR_LIMIT if all calls together read many more than the file has bytes. */
MU_API mu_status mu_checkpoint_quantization(mu_checkpoint_file *k, int64_t i, mu_quantization *out) MU_MUST_USE;
/* The elements as numbers of type `as`: MU_F64, MU_F32, or MU_I64 for integers and bool; bytes = elements
 * times mu_dtype_bytes(as), out not NULL. Also types that Muster cannot compute with: unsigned and quantised ones as their
 * integers, floats of eight bits. MU_ERR_DTYPE for others; other errors as of mu_checkpoint_read. */
MU_API mu_status mu_checkpoint_read_as(mu_checkpoint_file *k, int64_t i, mu_dtype as, void *out, size_t bytes) MU_MUST_USE;

/* Of the one file that was opened: of an index, its shards are not counted. */
typedef struct mu_checkpoint_facts {
    int64_t file_bytes;
    int64_t trailing_bytes;                   /* after what the format reads: harmless, but odd */
    int64_t members;                          /* of the zip; 0 for other formats */
    int64_t storages, storage_bytes;          /* of pickled files: those that the object refers to */
    int64_t unreferenced, unreferenced_bytes; /* storages that it does not */
} mu_checkpoint_facts;
MU_API mu_checkpoint_facts mu_checkpoint_get_facts(const mu_checkpoint_file *k);
/* Reads every member of a zip, also those that are not tensors: a pass over the whole file. verified gets how many
 * checksums were compared (with no_checksum none); may be NULL. MU_ERR_FORMAT at the first that is damaged, MU_ERR_LIMIT
 * at one that is too large. Other formats have no checksums; of an index, reading the tensors verifies those of the
 * shards. */
MU_API mu_status mu_checkpoint_check_members(mu_checkpoint_file *k, int64_t *verified) MU_MUST_USE;
/* The optimisers' states ({"state": .., "param_groups": ..}) that the file's object is, or has as items or in lists that
 * are its items: returns how many there are, and fills in, for the first `room` ones, how many parameters each has in its
 * groups. parameters may be NULL. */
MU_API int64_t mu_checkpoint_optimizers(const mu_checkpoint_file *k, int64_t *parameters, int64_t room);
/* Names that Python would import or call to load the file, outside the harmless set; and all names, with those that
 * only build data. NULL-terminated, sorted; names beyond 500 bytes are cut. */
MU_API const char *const *mu_checkpoint_globals(const mu_checkpoint_file *k);
MU_API const char *const *mu_checkpoint_all_globals(const mu_checkpoint_file *k);

/* The parts of a file's object that can be meant by "the state dict": dicts of tensors, pickled modules, a whole
 * safetensors file or TorchScript archive; where there is none of these, a list of tensors or a bare tensor. Optimiser
 * state never is one. path is borrowed from the checkpoint. */
typedef struct mu_state_dict {
    const char *path;     /* keys joined by dots, without "<Class>"; "": the whole object */
    int64_t first, count; /* entries [first, first + count) of the file */
} mu_state_dict;
MU_API int64_t mu_checkpoint_state_dicts(const mu_checkpoint_file *k); /* how many */
/* Number i, in the file's order; where there is none, path "" and no entries. */
MU_API mu_state_dict mu_checkpoint_state_dict(const mu_checkpoint_file *k, int64_t i);
/* key NULL: the only candidate; where there are several, MU_ERR_ARG with a list of them and their counts, where there is
 * none, MU_ERR_FORMAT. Else the part below that path, candidate or not ("": everything); MU_ERR_ARG where no tensor is. */
MU_API mu_status mu_checkpoint_find_state_dict(mu_checkpoint_file *k, const char *key, mu_state_dict *out) MU_MUST_USE;
/* Name of entry i of the file, below the dict and without "<Class>"; NULL when the entry is not below it. */
MU_API const char *mu_checkpoint_name_in(const mu_checkpoint_file *k, const mu_state_dict *d, int64_t i);
/* The names of all of the dict's entries after the rules of rename ("FROM=TO", NULL-terminated, NULL: none; as in
 * mu_load_options), into out[d->count]; NULL for what is below another path. They belong to the checkpoint. Two names that
 * become one are MU_ERR_FORMAT, a rule that is none MU_ERR_ARG. */
MU_API mu_status mu_checkpoint_names_in(mu_checkpoint_file *k, const mu_state_dict *d, const char *const *rename,
                                        const char **out) MU_MUST_USE;

/* Conversion. Names change in this order: strip_prefix, rename, prefix. */
typedef struct mu_convert_options {
    mu_file_format format;
    const char *key;            /* path of the state dict in the file; NULL: the only one */
    const char *strip_prefix;   /* removed from the names that begin with it, e.g. "module."; NULL: none */
    const char *const *rename;  /* NULL-terminated "FROM=TO" as in mu_load_options; NULL: none */
    const char *prefix;         /* put before every name; NULL: none */
    bool change_dtype;          /* float32, float64, float16 and bfloat16 tensors become dtype, one of these four, rounded */
    mu_dtype dtype;             /* to nearest even as PyTorch does (float64 by way of float32); others keep their type */
} mu_convert_options;

/* What a conversion did. Text belongs to the context and is valid until its next conversion. */
typedef struct mu_convert_report {
    int64_t written;   /* tensors, tied ones included */
    int64_t converted; /* to another element type */
    int64_t renamed;
    int64_t tied;      /* names whose elements are those of another name */
    int64_t separated; /* tensors that shared a storage otherwise than as a whole; each has its own elements now */
    int64_t left_out;  /* of the file: values that are not in the new one, each with what is below it */
    const char *text;  /* several lines for people: names of all that was left out, tied, separated, converted, renamed */
} mu_convert_report;

/* Writes a state dict of an open file as a file of its own, atomically; path may be the file it came from. Not collective:
 * in a group, one rank does it. Elements are
 * exact unless change_dtype; tied tensors stay tied; _metadata goes from PyTorch's formats to PyTorch's formats. Memory
 * is that of the largest tensor. What the format cannot hold (sparse tensors; in safetensors, complex128 and quantised
 * ones) is MU_ERR_UNSUPPORTED with the tensor's name, and nothing is written; so are two names that become one,
 * MU_ERR_FORMAT. options and report may be NULL. */
MU_API mu_status mu_checkpoint_convert(mu_checkpoint_file *k, const char *path, const mu_convert_options *options,
                                       mu_convert_report *report) MU_MUST_USE;

#ifdef __cplusplus
}
#endif
#endif
