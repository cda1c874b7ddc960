/* What can be said of a file as a whole: its sizes, what nothing refers to, its optimisers, and whether all of it is
 * intact. */
#include "base/alloc.h"
#include "io/checkpoint_file.h"

mu_checkpoint_facts mu_checkpoint_get_facts(const mu_checkpoint_file *k)
{
    mu_checkpoint_facts f = {0};
    if (k == NULL) {
        return f;
    }
    f.file_bytes = (int64_t)k->map.bytes;
    f.trailing_bytes = (int64_t)k->trailing_bytes;
    f.members = (int64_t)k->zip.count;
    for (size_t i = 0; i < k->blob_count; i++) {
        const mui_blob *b = &k->blobs[i];
        if (b->dtype != NULL) {
            f.storages++;
            f.storage_bytes += (int64_t)mui_blob_bytes(b);
        } else {
            f.unreferenced++;
            f.unreferenced_bytes += b->member != NULL ? (int64_t)b->member->bytes : 0;
        }
    }
    return f;
}

mu_status mu_checkpoint_check_members(mu_checkpoint_file *k, int64_t *verified)
{
    if (k == NULL) {
        return MU_ERR_ARG;
    }
    int64_t n = 0;
    for (size_t i = 0; i < k->zip.count; i++) {
        mui_zip_member *m = &k->zip.members[i];
        const unsigned char *data = NULL;
        void *owned = NULL;
        mu_status s = mui_zip_check_ratio(&k->zip, m);
        if (s == MU_OK && m->bytes > k->limits.tensor_bytes) {
            s = mui_fail(k->context, MU_ERR_LIMIT, "%s: member '%s' has %llu bytes, more than the limit of %llu", k->path,
                         m->name, (unsigned long long)m->bytes, (unsigned long long)k->limits.tensor_bytes);
        }
        if (s == MU_OK) {
            s = mui_zip_read(&k->zip, m, &data, &owned);
        }
        mui_free(k->context, owned);
        if (s != MU_OK) {
            return s;
        }
        n += !k->limits.no_checksum && (m->crc != 0 || m->bytes == 0); /* 0: its writer computed none */
    }
    if (verified != NULL) {
        *verified = n;
    }
    return MU_OK;
}

/* -- optimisers --------------------------------------------------------------------------------------------------- */

/* The number of parameters in an optimiser's groups; -1 when v is none. */
static int64_t parameters_of(const mui_value *v)
{
    const mui_value *dict = v->kind == MUI_OBJECT && v->object->state != NULL ? v->object->state : v;
    const mui_value *groups = mui_dict_get(dict, "param_groups");
    int64_t n = 0;
    if (groups == NULL || groups->kind != MUI_LIST || mui_dict_get(dict, "state") == NULL) {
        return -1;
    }
    for (size_t i = 0; i < groups->seq.count; i++) {
        const mui_value *params = mui_dict_get(groups->seq.items[i], "params");
        n += params != NULL && params->kind == MUI_LIST ? (int64_t)params->seq.count : 0;
    }
    return n;
}

typedef struct found {
    int64_t *parameters;
    int64_t count, room;
} found;

static bool add_optimizer(found *f, const mui_value *v)
{
    int64_t n = parameters_of(v);
    if (n < 0) {
        return false;
    }
    if (f->count < f->room) {
        f->parameters[f->count] = n;
    }
    f->count++;
    return true;
}

int64_t mu_checkpoint_optimizers(const mu_checkpoint_file *k, int64_t *parameters, int64_t room)
{
    found f = {.parameters = parameters, .room = parameters != NULL ? room : 0};
    const mui_value *root = k != NULL ? k->pickle.value : NULL;
    const mui_seq *items = NULL;
    if (root == NULL || add_optimizer(&f, root) || !mui_dict_items(root, &items)) {
        return f.count;
    }
    for (size_t i = 0; i + 1 < items->count; i += 2) {
        const mui_value *v = items->items[i + 1];
        bool is_list = v->kind == MUI_LIST; /* Lightning's optimizer_states */
        if (!add_optimizer(&f, v)) {
            for (size_t j = 0; is_list && j < v->seq.count && j < 16; j++) {
                add_optimizer(&f, v->seq.items[j]);
            }
        }
    }
    return f.count;
}
