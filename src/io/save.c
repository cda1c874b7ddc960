/* mu_save, and the parts of it that training checkpoints are made of too. */
#include "io/save.h"
#include "base/alloc.h"
#include "base/beacon.h"
#include "io/tree.h"
#include <muster/checkpoint.h>

#include <stdio.h>
#include <string.h>

/* What the reader takes, in the file of a training run too, where names are below "model". */
enum { LONGEST_NAME = MUI_MAX_NAME_BYTES - (int)sizeof("model") };

/* -- the state dict as pickle ------------------------------------------------------------------------------------- */

/* Versions of modules' state: torch counts 2 for batch norm (with num_batches_tracked) and 1 for all others. */
static void put_version(mui_pickle_writer *w, mu_module *root, const char *prefix, const char *path)
{
    mu_module *m = path[0] != '\0' ? mu_module_get(root, path) : root;
    bool batch_norm = m != NULL && strstr(mu_module_kind(m), "BatchNorm") != NULL;
    char *key = mui_format(w->context, "%s%s", prefix, path);
    if (key == NULL) {
        w->failed = true;
        return;
    }
    size_t n = strlen(key);
    if (path[0] == '\0' && n > 0 && key[n - 1] == '.') {
        key[n - 1] = '\0'; /* the root below "module." is "module" */
    }
    mui_pk_text(w, key);
    mui_pk_op(w, '}');
    mui_pk_text(w, "version");
    mui_pk_int(w, batch_norm ? 2 : 1);
    mui_pk_op(w, 's');
    mui_free(w->context, key);
}

/* The modules above state names, parents first. Names come in tree order, so a module is new exactly when its path
 * goes beyond what the name before shares. */
static void put_versions(mui_pickle_writer *w, mu_module *root, const mui_states *s, const char *prefix)
{
    mui_pk_ordered_dict(w);
    mui_pk_op(w, '(');
    if (prefix[0] != '\0') {
        mui_pk_text(w, "");
        mui_pk_op(w, '}');
        mui_pk_text(w, "version");
        mui_pk_int(w, 1);
        mui_pk_op(w, 's');
    }
    put_version(w, root, prefix, "");
    for (size_t i = 0; i < s->count && !w->failed; i++) {
        const char *name = s->items[i].name, *before = i > 0 ? s->items[i - 1].name : "";
        size_t shared = 0;
        while (name[shared] != '\0' && name[shared] == before[shared]) {
            shared++;
        }
        for (const char *dot = strchr(name, '.'); dot != NULL; dot = strchr(dot + 1, '.')) {
            size_t n = (size_t)(dot - name);
            if (n < shared) { /* the dot itself is shared */
                continue;
            }
            char *path = mui_strndup(w->context, name, n);
            if (path == NULL) {
                w->failed = true;
                return;
            }
            put_version(w, root, prefix, path);
            mui_free(w->context, path);
        }
    }
    mui_pk_op(w, 'u');
}

int64_t mui_save_state_dict(mui_pickle_writer *w, mu_module *root, const mui_states *s, const char *prefix,
                            int64_t first)
{
    int64_t next = first;
    prefix = prefix != NULL ? prefix : "";
    int64_t *keys = mui_calloc(w->context, s->count, sizeof(*keys));
    if (keys == NULL) {
        w->failed = true;
        return next;
    }
    mui_pk_ordered_dict(w);
    mui_pk_op(w, '(');
    for (size_t i = 0; i < s->count; i++) {
        const mui_state *x = &s->items[i];
        keys[i] = x->same_as == i ? next++ : keys[x->same_as];
        char *name = mui_format(w->context, "%s%s", prefix, x->name);
        if (name == NULL) {
            w->failed = true;
            break;
        }
        if (strlen(name) > LONGEST_NAME) {
            mui_fail(w->context, MU_ERR_LIMIT, "the name %.60s... has %zu bytes; checkpoints can have names of %d", name,
                     strlen(name), LONGEST_NAME);
            w->failed = true;
        }
        mui_pk_text(w, name);
        mui_free(w->context, name);
        mui_pk_tensor(w, keys[i], x->value->dtype, x->value->dims);
    }
    mui_pk_op(w, 'u');
    mui_pk_op(w, '}'); /* state of the OrderedDict: its attribute _metadata */
    mui_pk_text(w, "_metadata");
    put_versions(w, root, s, prefix);
    mui_pk_op(w, 's');
    mui_pk_op(w, 'b');
    mui_free(w->context, keys);
    return next;
}

/* -- the archive -------------------------------------------------------------------------------------------------- */

/* PyTorch names the folder after the file, less its last extension. */
static char *root_of(mu_context *c, const char *path)
{
    const char *slash = strrchr(path, '/'), *base = slash != NULL ? slash + 1 : path, *dot = strrchr(base, '.');
    size_t n = dot != NULL && dot != base ? (size_t)(dot - base) : strlen(base);
    char *root = n > 0 ? mui_strndup(c, base, n) : mui_strdup(c, "archive");
    for (char *p = root; p != NULL && *p != '\0'; p++) {
        *p = *p == '\\' || (unsigned char)*p < 0x20 ? '_' : *p;
    }
    if (root != NULL && (strcmp(root, ".") == 0 || strcmp(root, "..") == 0)) {
        mui_free(c, root);
        root = mui_strdup(c, "archive");
    }
    return root;
}

static void write_member(mui_archive *a, const char *name, const void *data, size_t bytes)
{
    char full[512];
    snprintf(full, sizeof(full), "%s/%s", a->root, name); /* a file name has at most 255 bytes */
    mui_zip_member_write(&a->zip, full, data, bytes);
}

mu_status mui_archive_open(mu_context *c, const char *path, const mui_pickle_writer *pickle, mui_archive *out)
{
    if (pickle->failed) {
        return mu_context_status(c);
    }
    *out = (mui_archive){.root = root_of(c, path)};
    if (out->root == NULL) {
        return MU_ERR_NOMEM;
    }
    mu_status s = mui_outfile_open(c, path, &out->file);
    if (s != MU_OK) {
        mui_free(c, out->root);
        return s;
    }
    mui_zip_writer_init(&out->zip, &out->file);
    write_member(out, "data.pkl", pickle->data, pickle->bytes);
    write_member(out, "byteorder", "little", 6);
    return MU_OK;
}

void mui_archive_storage(mui_archive *a, int64_t key, const void *data, size_t bytes)
{
    char name[40];
    snprintf(name, sizeof(name), "data/%lld", (long long)key);
    write_member(a, name, data, bytes);
}

mu_status mui_archive_states(mui_archive *a, const mui_states *s, int64_t first)
{
    size_t largest = 0;
    for (size_t i = 0; i < s->count; i++) {
        const mu_tensor *t = s->items[i].value;
        size_t bytes = (size_t)mui_dims_elements(t->dims) * mu_dtype_bytes(t->dtype);
        largest = bytes > largest ? bytes : largest;
    }
    char *row_major = mui_alloc(s->context, largest);
    mu_status status = row_major != NULL ? MU_OK : MU_ERR_NOMEM;
    for (size_t i = 0; i < s->count && status == MU_OK; i++) {
        const mu_tensor *t = s->items[i].value;
        size_t bytes = (size_t)mui_dims_elements(t->dims) * mu_dtype_bytes(t->dtype);
        if (s->items[i].same_as != i) {
            continue;
        }
        status = mui_tensor_get_raw(t, row_major, bytes);
        if (status == MU_OK) {
            mui_archive_storage(a, first++, row_major, bytes);
            status = a->file.status;
        }
    }
    mui_free(s->context, row_major);
    return status;
}

mu_status mui_archive_close(mui_archive *a, mu_status status)
{
    mu_context *c = a->file.context;
    if (status == MU_OK) {
        write_member(a, "version", "3\n", 2);
    }
    mu_status finished = mui_zip_finish(&a->zip);
    status = status != MU_OK ? status : finished;
    mui_free(c, a->root);
    if (status != MU_OK) {
        mui_outfile_abandon(&a->file);
        return status;
    }
    return mui_outfile_commit(&a->file);
}

mu_status mu_save(mu_module *root, const char *path, const mu_save_options *options)
{
    if (root == NULL) {
        return MU_ERR_ARG;
    }
    mu_context *c = mu_module_context(root);
    if (mui_failed(c)) {
        return mu_context_status(c);
    }
    if (path == NULL || path[0] == '\0') {
        return mui_fail(c, MU_ERR_ARG, "mu_save: no path");
    }
    mui_states states;
    mu_status s = mui_states_list(c, root, &states);
    if (s != MU_OK) {
        return s;
    }
    mui_pickle_writer pickle;
    mui_archive archive;
    mui_place before = mui_go(c, MUI_SAVING, path);
    mui_pk_start(&pickle, c);
    mui_save_state_dict(&pickle, root, &states, options != NULL ? options->prefix : NULL, 0);
    mui_pk_op(&pickle, '.');
    s = mui_archive_open(c, path, &pickle, &archive);
    if (s == MU_OK) {
        s = mui_archive_close(&archive, mui_archive_states(&archive, &states, 0));
    }
    mui_pk_free(&pickle);
    mui_states_free(&states);
    mui_go(c, before.stage, before.path);
    return s;
}
