/* The elements of a load: checked in the file, then from the file into the model, alone or over a group. */
#include "base/alloc.h"
#include "comm/agree.h"
#include "comm/group.h"
#include "io/copy_large.h"
#include "io/load_convert.h"
#include "io/load_plan.h"
#include "io/file_elements.h"

#include <string.h>

#define STORED_BYTES ((size_t)256 << 10) /* converted at once */
#define PIECE_BYTES ((size_t)4 << 20)    /* sent at once */

void mui_plan_drop_data(mui_plan *p)
{
    for (size_t i = 0; i < p->states.count && p->items != NULL; i++) {
        mui_free(p->context, p->items[i].staged);
        p->items[i].staged = NULL;
    }
    mui_free(p->context, p->fragile);
    mui_free(p->context, p->stored);
    mui_free(p->context, p->piece);
    mui_free(p->context, p->whole);
    p->fragile = NULL;
    p->stored = p->piece = p->whole = NULL;
    mu_checkpoint_close(p->file);
    p->file = NULL;
}

static size_t element_bytes(const mui_plan *p, size_t i)
{
    return mu_dtype_bytes(p->states.items[i].value->dtype);
}

static int64_t elements(const mui_plan *p, size_t i)
{
    return mui_dims_elements(p->states.items[i].value->dims);
}

static mu_status source_of(const mui_plan *p, size_t i, mui_elements *out)
{
    const mui_entry *e = &p->file->tree.entries[p->items[i].entry];
    return mui_elements_open(p->file, e->name, e->tensor, out);
}

/* Elements [from, from + n) in the model's type. Nothing here can fail: judging has seen to the types. */
static mu_status convert_some(const mui_plan *p, const mui_elements *s, size_t i, int64_t from, int64_t n, char *out)
{
    mu_dtype have = s->tensor->dtype->carrier, want = p->states.items[i].value->dtype;
    mu_status status = MU_OK;
    int64_t most = (int64_t)(STORED_BYTES / mu_dtype_bytes(have));
    for (int64_t done = 0; done < n && status == MU_OK; done += most) {
        int64_t now = n - done < most ? n - done : most;
        mui_elements_read(s, from + done, now, p->stored);
        status = mui_convert(p->context, have, want, now, p->stored, out + (size_t)done * element_bytes(p, i));
    }
    return status;
}

static mu_status read_some(const mui_plan *p, const mui_elements *s, size_t i, int64_t from, int64_t n, char *out)
{
    size_t size = element_bytes(p, i);
    if (s->tensor->dtype->carrier != p->states.items[i].value->dtype) {
        return convert_some(p, s, i, from, n, out);
    }
    if (s->direct) {
        mui_copy_large(out, s->first + (size_t)from * size, (size_t)n * size);
    } else {
        mui_elements_read(s, from, n, out);
    }
    return MU_OK;
}

/* -- the reader checks ---------------------------------------------------------------------------------------------- */

static mu_status verify(mui_plan *p, size_t i)
{
    mui_elements source;
    mu_status s = source_of(p, i, &source);
    if (s != MU_OK || source.mapped) {
        return s;
    }
    char **staged = &p->items[i].staged;
    *staged = mui_alloc(p->context, (size_t)elements(p, i) * element_bytes(p, i));
    return *staged != NULL ? read_some(p, &source, i, 0, elements(p, i), *staged) : MU_ERR_NOMEM;
}

mu_status mui_plan_verify(mui_plan *p, mu_checkpoint_file *k)
{
    p->file = k;
    p->stored = mui_alloc(p->context, STORED_BYTES);
    mu_status s = p->stored != NULL ? MU_OK : MU_ERR_NOMEM;
    mui_filemap_expect_all(&k->map);
    for (size_t i = 0; i < p->states.count && s == MU_OK; i++) {
        if (p->items[i].take && p->items[i].entry != SIZE_MAX) {
            s = verify(p, i);
        }
    }
    mui_checkpoint_drop_inflated(k);
    return s;
}

/* -- all ranks prepare ---------------------------------------------------------------------------------------------- */

/* Ranks may keep a tensor differently, and must write in the same order. */
static mu_status find_laid_out(mui_plan *p, mu_group *g)
{
    size_t count = p->states.count;
    int32_t *flags = mui_calloc(p->context, count, sizeof(*flags));
    p->fragile = mui_calloc(p->context, count, sizeof(*p->fragile));
    mu_status s = flags == NULL || p->fragile == NULL ? MU_ERR_NOMEM : MU_OK;
    for (size_t i = 0; i < count && s == MU_OK; i++) {
        flags[i] = !mui_tensor_is_plain(p->states.items[i].value);
        s = p->items[i].take ? mui_tensor_check_writable(p->states.items[i].value) : MU_OK;
    }
    s = mui_agree(p->context, g, s);
    if (s == MU_OK && mui_is_shared(g) && count > 0) {
        s = mu_all_reduce(g, flags, (int64_t)count, MU_I32, MU_MAX);
    }
    for (size_t i = 0; i < count && s == MU_OK; i++) {
        p->items[i].laid_out = flags[i] != 0;
        if (flags[i] != 0 && p->items[i].take) {
            p->fragile[p->states.items[i].same_as] = true;
        }
    }
    mui_free(p->context, flags);
    return s;
}

mu_status mui_plan_prepare(mui_plan *p, mu_group *g)
{
    mu_status s = find_laid_out(p, g);
    if (s != MU_OK) {
        return s;
    }
    size_t whole = 0;
    for (size_t i = 0; i < p->states.count; i++) {
        size_t bytes = (size_t)elements(p, i) * element_bytes(p, i);
        whole = p->items[i].take && p->items[i].laid_out && bytes > whole ? bytes : whole;
    }
    p->whole = mui_alloc(p->context, whole);
    p->piece = p->whole != NULL && mui_is_shared(g) ? mui_alloc(p->context, PIECE_BYTES) : NULL;
    bool good = p->whole != NULL && (p->piece != NULL || !mui_is_shared(g));
    return mui_agree(p->context, g, good ? MU_OK : MU_ERR_NOMEM);
}

/* -- from the file --------------------------------------------------------------------------------------------------- */

/* The reader: elements [from, from + n) of state i in the model's type. */
static mu_status fetch(mui_plan *p, size_t i, int64_t from, int64_t n, char *out)
{
    const mui_plan_item *item = &p->items[i];
    size_t size = element_bytes(p, i);
    if (item->entry == SIZE_MAX) {
        memset(out, 0, (size_t)n * size);
        return MU_OK;
    }
    if (item->staged != NULL) {
        mui_copy_large(out, item->staged + (size_t)from * size, (size_t)n * size);
        return MU_OK;
    }
    mui_elements source;
    mu_status s = source_of(p, i, &source);
    int64_t most = (int64_t)(MUI_MAPPED_WINDOW / 16); /* in elements: of 16 bytes at most */
    for (int64_t done = 0; done < n && s == MU_OK; done += most) {
        int64_t now = n - done < most ? n - done : most;
        s = read_some(p, &source, i, from + done, now, out + (size_t)done * size);
        mui_filemap_used(&p->file->map, (size_t)now * source.tensor->dtype->bytes);
    }
    return s;
}

/* -- into the model --------------------------------------------------------------------------------------------------- */

/* Where the row-major elements of state i are wanted: in the model itself, or, to be reordered, all of it in one place. */
static char *place_of(const mui_plan *p, size_t i)
{
    mu_tensor *t = p->states.items[i].value;
    return mui_tensor_is_plain(t) ? t->data : p->whole;
}

/* All elements of state i are in their place. */
static mu_status finish(mui_plan *p, size_t i)
{
    mu_tensor *t = p->states.items[i].value;
    mui_tensor_touch(t);
    return mui_tensor_is_plain(t) ? MU_OK
                                  : mui_tensor_set_raw(t, p->whole, (size_t)elements(p, i) * element_bytes(p, i));
}

static bool is_due(const mui_plan *p, size_t i, bool laid_out)
{
    return p->items[i].take && p->items[i].laid_out == laid_out;
}

static mu_status write_alone(mui_plan *p, bool laid_out)
{
    mu_status s = MU_OK;
    for (size_t i = 0; i < p->states.count && s == MU_OK; i++) {
        if (is_due(p, i, laid_out)) {
            s = elements(p, i) > 0 ? fetch(p, i, 0, elements(p, i), place_of(p, i)) : MU_OK;
            s = s == MU_OK ? finish(p, i) : s;
        }
    }
    return s;
}

/* -- over a group ------------------------------------------------------------------------------------------------------ */

/* All states that are due are one stream of row-major bytes, cut into pieces. A place in it: */
typedef struct cursor {
    size_t state;
    int64_t element;
} cursor;

/* What a piece brings of one state. */
typedef mu_status (*part_fn)(mui_plan *p, size_t i, int64_t from, int64_t n, char *piece);

static mu_status pack(mui_plan *p, size_t i, int64_t from, int64_t n, char *piece)
{
    return n > 0 ? fetch(p, i, from, n, piece) : MU_OK;
}

static mu_status unpack(mui_plan *p, size_t i, int64_t from, int64_t n, char *piece)
{
    size_t size = element_bytes(p, i);
    if (n > 0) {
        mui_copy_large(place_of(p, i) + (size_t)from * size, piece, (size_t)n * size);
    }
    return from + n == elements(p, i) ? finish(p, i) : MU_OK;
}

/* Runs fn over the states of the piece that begins at *at, moves *at to its end, and says how long it is: 0 at the end of
 * all. fn NULL: only that. */
static mu_status over_piece(mui_plan *p, bool laid_out, cursor *at, part_fn fn, size_t *bytes)
{
    mu_status s = MU_OK;
    for (*bytes = 0; at->state < p->states.count; at->state++, at->element = 0) {
        if (!is_due(p, at->state, laid_out)) {
            continue;
        }
        size_t size = element_bytes(p, at->state);
        *bytes = (*bytes + 15) / 16 * 16; /* so that conversions find their elements aligned */
        int64_t room = (int64_t)((PIECE_BYTES - *bytes) / size), left = elements(p, at->state) - at->element;
        int64_t n = left < room ? left : room;
        if (fn != NULL && s == MU_OK) {
            s = fn(p, at->state, at->element, n, p->piece + *bytes);
        }
        *bytes += (size_t)n * size;
        at->element += n;
        if (n < left) {
            break; /* full */
        }
    }
    return s;
}

/* A rank that fails takes part to the end all the same; *mine is how this one fared. */
static mu_status write_shared(mui_plan *p, mu_group *g, bool laid_out, mu_status *mine)
{
    cursor at = {0};
    mu_status s = MU_OK;
    *mine = MU_OK;
    while (s == MU_OK && at.state < p->states.count) {
        cursor from = at;
        size_t bytes = 0;
        part_fn bring = mui_is_reader(g) && *mine == MU_OK ? pack : NULL;
        mu_status packed = over_piece(p, laid_out, &at, bring, &bytes);
        s = bytes > 0 ? mu_broadcast(g, p->piece, bytes, 0) : MU_OK;
        *mine = *mine == MU_OK ? packed : *mine;
        if (s == MU_OK && *mine == MU_OK) {
            *mine = over_piece(p, laid_out, &from, unpack, &bytes);
        }
    }
    return s;
}

static mu_status write_states(mui_plan *p, mu_group *g, bool laid_out)
{
    mu_status mine = MU_OK;
    if (!mui_is_shared(g)) {
        return write_alone(p, laid_out);
    }
    mu_status s = write_shared(p, g, laid_out, &mine);
    return s == MU_OK ? mui_agree(p->context, g, mine) : s;
}

mu_status mui_plan_write_laid_out(mui_plan *p, mu_group *g)
{
    return write_states(p, g, true);
}

mu_status mui_plan_write_plain(mui_plan *p, mu_group *g)
{
    for (size_t i = 0; i < p->states.count; i++) {
        mu_parameter *owner = p->states.items[i].value->parameter;
        if (p->items[i].take && owner != NULL) {
            /* Whoever loads is where the file is, however often, not where its optimiser has been. */
            owner->updates = MUI_STEPS_LOADED;
        }
    }
    return write_states(p, g, false);
}
