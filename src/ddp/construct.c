/* What all ranks must have in common before anything is averaged: described in text, compared by hash, and, where it
 * differs, by line, so that every rank names the same first difference. */
#include "base/alloc.h"
#include "base/beacon.h"
#include "base/rng.h"
#include "ddp/replica.h"

#include <stdio.h>
#include <string.h>

mu_status mui_ddp_gate(mu_ddp *d, uint32_t kind, const char *text)
{
    mui_identity id = {.kind = kind, .sequence = d->reducer != NULL ? mui_reducer_sequence(d->reducer) : 0};
    id.hash = mui_hash_string(mui_hash_u64(MUI_HASH_START, (uint64_t)d->ordinal), d->name);
    snprintf(id.text, sizeof(id.text), "%s", text);
    mu_status s = mui_gate(d->group, &id);
    return s < 0 ? mui_ddp_break(d, s) : MU_OK;
}

mu_status mui_ddp_meet(mu_ddp *d, uint32_t kind, const char *what, mui_aside *aside)
{
    aside->status = MU_OK;
    if (d->broken != MU_OK) {
        return mui_fail(d->context, d->broken, "%s", d->broken_text);
    }
    mui_aside_put(d->context, aside);
    mu_status s = mui_ddp_follow(d);
    if (s >= 0) {
        char text[MUI_IDENTITY_TEXT];
        snprintf(text, sizeof(text), "%.40s after reduction %llu (ddp `%.80s`)", what,
                 (unsigned long long)mui_reducer_sequence(d->reducer) - 1, d->name);
        s = mui_ddp_gate(d, kind, text);
    }
    return s;
}

mu_status mui_ddp_part(mu_ddp *d, const mui_aside *aside, mu_status s)
{
    mui_ddp_work(d, NULL);
    mui_aside_restore(d->context, aside);
    return aside->status != MU_OK ? aside->status : s;
}

/* Whether a parameter's full name is this name, seen from a module above it. */
static bool is_its_name(const mu_parameter *p, const char *name)
{
    size_t n = strlen(name), whole = strlen(p->name);
    return n <= whole && strcmp(p->name + whole - n, name) == 0 && (n == whole || p->name[whole - n - 1] == '.');
}

/* Buffers, and the other names of tied parameters. */
static bool add_state(void *user, const char *name, mu_tensor *value, mu_parameter *p)
{
    char dims[MUI_DIMS_TEXT];
    if (p == NULL) {
        mui_text_add(user, "buffer `%s` %s %s\n", name, mui_dims_text(value->dims, dims), mu_dtype_name(value->dtype));
    } else if (!is_its_name(p, name)) {
        mui_text_add(user, "parameter `%s`, tied to `%s`\n", name, p->name);
    }
    return true;
}

mu_status mui_ddp_describe(mu_ddp *d, mui_store *s, mui_text *out)
{
    const mu_ddp_options *o = &d->options;
    mui_text_clear(out);
    mui_text_add(out,
                 "a %s group; buckets of %zu bytes, the first of %zu; buffers %s; absent policy %d; nonfinite policy "
                 "%d; check every %d; mean over %s\n",
                 mu_group_kind(d->group), o->bucket_bytes, o->first_bucket_bytes,
                 o->buffers_from_rank0 ? "from rank 0" : "averaged", (int)o->absent, (int)o->nonfinite, o->check_every,
                 o->mean_over_contributors ? "contributors" : "all ranks");
    mui_source *source = (mui_source *)d->root;
    for (int64_t i = 0; i < s->count; i++) {
        const mu_parameter *p = s->parameters[i];
        char dims[MUI_DIMS_TEXT];
        if (source->contains(source, p)) {
            mui_text_add(out, "parameter `%s` %s %s, %s, layout %s\n", p->name, mui_dims_text(p->value.dims, dims),
                         mu_dtype_name(p->value.dtype), p->frozen ? "frozen" : "trainable",
                         mui_layout_name(p->value.layout));
        }
    }
    mu_status status = mu_module_each_state(d->root, add_state, out);
    return status != MU_OK ? status : out->failed ? MU_ERR_NOMEM : MU_OK;
}

static size_t line_length(const char *s)
{
    const char *end = strchr(s, '\n');
    return end != NULL ? (size_t)(end - s) : strlen(s);
}

static void copy_line(char *out, size_t size, const char *line)
{
    size_t n = line_length(line);
    snprintf(out, size, "%.*s", n > 0 ? (int)n : 7, n > 0 ? line : "nothing");
}

bool mui_ddp_first_difference(const char *a, const char *b, char *line_a, char *line_b, size_t line_bytes)
{
    while (*a != '\0' || *b != '\0') {
        size_t na = line_length(a), nb = line_length(b);
        if (na != nb || memcmp(a, b, na) != 0) {
            copy_line(line_a, line_bytes, a);
            copy_line(line_b, line_bytes, b);
            return true;
        }
        a += na + (a[na] == '\n');
        b += nb + (b[nb] == '\n');
    }
    return false;
}

/* Everybody gets everybody's text and looks for the same first difference. */
static mu_status name_difference(mu_group *g, const char *who, const char *what, const mui_text *mine, size_t longest)
{
    mu_context *c = g->context;
    size_t n = longest + 1, size = (size_t)mu_group_size(g);
    char *all = mui_calloc(c, size, n), *own = mui_calloc(c, 1, n);
    mu_status s = all == NULL || own == NULL ? MU_ERR_NOMEM : MU_OK;
    if (s == MU_OK) {
        memcpy(own, mui_text_get(mine), mine->length);
        s = mu_all_gather(g, own, all, n);
    }
    for (size_t r = 1; s == MU_OK && r < size; r++) {
        char zero[300], other[300];
        if (mui_ddp_first_difference(all, all + r * n, zero, other, sizeof(zero))) {
            s = mui_fail(c, MU_ERR_COMM, "%s: the ranks' %s differ: rank 0 has %s, rank %zu has %s", who, what, zero, r,
                         other);
        }
    }
    if (s == MU_OK) {
        s = mui_fail(c, MU_ERR_INTERNAL, "%s: descriptions of equal text have different hashes", who);
    }
    mui_free(c, all);
    mui_free(c, own);
    return s;
}

mu_status mui_compare_texts(mu_group *g, const char *who, const char *what, const mui_text *mine)
{
    mu_context *c = g->context;
    size_t size = (size_t)mu_group_size(g);
    uint64_t own[2] = {mui_hash_bytes(MUI_HASH_START, mui_text_get(mine), mine->length), mine->length};
    uint64_t *all = mui_calloc(c, size, sizeof(own));
    if (all == NULL) {
        return MU_ERR_NOMEM;
    }
    mu_status s = mu_all_gather(g, own, all, sizeof(own));
    bool equal = true;
    size_t longest = 0;
    for (size_t r = 0; r < size; r++) {
        equal = equal && all[2 * r] == all[0] && all[2 * r + 1] == all[1];
        longest = all[2 * r + 1] > longest ? (size_t)all[2 * r + 1] : longest;
    }
    mui_free(c, all);
    return s < 0 || equal ? s : name_difference(g, who, what, mine, longest);
}

mu_status mui_ddp_compare(mu_ddp *d, const mui_text *mine)
{
    char who[96];
    snprintf(who, sizeof(who), "ddp `%.80s`", d->name);
    mu_status s = mui_compare_texts(d->group, who, "models", mine);
    if (s == MU_ERR_NOMEM) {
        return mui_ddp_desert(d, s);
    }
    return s < 0 && d->group->broken != MU_OK ? mui_ddp_break(d, s) : s;
}

mu_status mui_ddp_spread(mu_ddp *d)
{
    mui_store *st = d->store;
    uint64_t before = mui_hash_floats(MUI_HASH_START, st->values, st->floats);
    mu_status s = mu_broadcast(d->group, st->values, st->floats * sizeof(float), 0);
    if (mui_hash_floats(MUI_HASH_START, st->values, st->floats) != before) {
        mui_ddp_values_replaced(d);
    }
    if (s == MU_OK && st->buffer_floats > 0) {
        s = mu_broadcast(d->group, st->buffer_slab, st->buffer_floats * sizeof(float), 0);
    }
    if (s == MU_OK && d->counter_elements > 0) {
        mui_ddp_counters_get(d);
        s = mu_broadcast(d->group, d->counter_values, (size_t)d->counter_elements * sizeof(int64_t), 0);
        mui_ddp_counters_set(d);
    }
    return s < 0 ? mui_ddp_break(d, s) : MU_OK;
}
