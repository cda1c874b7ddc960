/* Scattering, running and gathering. */
#include "tape/parallel_frame.h"
#include "base/alloc.h"
#include "base/os.h"
#include "base/rng.h"
#include "base/trace.h"

#include <string.h>

static const char name[] = "data_parallel";

/* -- frames ----------------------------------------------------------------------------------------------------- */
static void free_frame(mui_frame *f, int count)
{
    for (int i = 0; f->replicas != NULL && i < count; i++) {
        mu_tape_free(f->replicas[i].tape);
    }
    mui_free(f->context, f->replicas);
    mui_free(f->context, f);
}

static void reset_frame(void *self)
{
    mui_frame *f = self;
    for (int i = 0; i < f->used; i++) {
        mu_tape_reset(f->replicas[i].tape);
    }
    f->main = NULL;
    if (f->owner == NULL) {
        free_frame(f, f->used); /* the others went with the owner */
    }
}

void mui_frame_release(mui_frame *f)
{
    mui_attachment **at = &f->main->attached;
    while (*at != &f->link) {
        at = &(*at)->next;
    }
    *at = f->link.next;
    reset_frame(f);
}

static mui_frame *new_frame(mui_parallel *p)
{
    mui_frame *f = mui_calloc(p->context, 1, sizeof(*f));
    if (f == NULL) {
        return NULL;
    }
    f->owner = p;
    f->context = p->context;
    f->replicas = mui_calloc(p->context, (size_t)p->count, sizeof(*f->replicas));
    for (int i = 0; f->replicas != NULL && i < p->count; i++) {
        f->replicas[i].tape = mui_tape_make(p->context, p->engines[i]);
        if (f->replicas[i].tape == NULL) {
            free_frame(f, i);
            return NULL;
        }
        f->replicas[i].tape->replica = true;
    }
    if (f->replicas == NULL) {
        free_frame(f, 0);
        return NULL;
    }
    f->link = (mui_attachment){.reset = reset_frame, .self = f};
    f->next = p->frames;
    p->frames = f;
    return f;
}

/* A free one, as old as can be, so that the frames of a step are taken in the same order each time. */
static mui_frame *free_one(const mui_parallel *p)
{
    mui_frame *found = NULL;
    for (mui_frame *f = p->frames; f != NULL; f = f->next) {
        found = f->main == NULL ? f : found;
    }
    return found;
}

static mu_status start(mui_parallel *p)
{
    mu_context *c = p->context;
    int threads = c->threads / p->count > 1 ? c->threads / p->count : 1;
    for (int i = 0; i < p->count; i++) {
        if (p->engines[i] == NULL) {
            p->engines[i] = mui_engine_fork(c, threads);
        }
        if (p->engines[i] == NULL) {
            return mui_failed(c) ? mu_context_status(c) : MU_ERR_NOMEM;
        }
    }
    if (p->team == NULL) {
        p->team = mui_team_new(c, p->count);
    }
    return p->team != NULL ? MU_OK : mu_context_status(c);
}

/* The replica's tape as the main one is now: options, open regions, step; and draws that no other has. */
static mu_status set_tape(mu_tape *t, const mu_tape *main, uint64_t salt)
{
    t->options = main->options;
    t->step = main->step;
    t->salt = salt;
    t->region_count = 0;
    for (size_t i = main->region_base; i < main->region_count; i++) {
        mu_no_grad_begin(t, main->regions[i].name);
    }
    return t->region_count == main->region_count - main->region_base ? MU_OK : MU_ERR_NOMEM;
}

static mui_frame *take_frame(mui_parallel *p, mu_tape *t, int64_t rows)
{
    mui_frame *f = start(p) == MU_OK ? free_one(p) : NULL;
    if (p->team == NULL || (f == NULL && (f = new_frame(p)) == NULL)) {
        return NULL;
    }
    /* As torch.chunk. */
    int64_t chunk = (rows + p->count - 1) / p->count;
    f->used = rows > 0 ? (int)((rows + chunk - 1) / chunk) : 1;
    uint64_t key = 0, stream = 0;
    mui_tape_draw(t, &key, &stream);
    for (int i = 0; i < f->used; i++) {
        mui_replica *r = &f->replicas[i];
        r->x = r->y = NULL;
        r->first = chunk * i;
        r->rows = i < f->used - 1 ? chunk : rows - r->first;
        r->settled = 0;
        if (set_tape(r->tape, t, mui_hash_u64(mui_hash_u64(key, stream), (uint64_t)i)) != MU_OK) {
            return NULL;
        }
    }
    f->main = t;
    f->link.next = t->attached;
    t->attached = &f->link;
    return f;
}

/* -- running ---------------------------------------------------------------------------------------------------- */
typedef struct job {
    mui_frame *frame;
    mui_team_fn fn;
} job;

static void run_bound(void *user, int i)
{
    const job *j = user;
    mui_replica *r = &j->frame->replicas[i];
    mui_bound *before = mui_bind(&r->bound);
    mui_engine_enter(r->tape->engine);
    j->fn(j->frame, i);
    if (j->frame->context->trace != NULL) {
        mui_trace_settle(j->frame->context);
    }
    mui_bind(before);
}

mu_status mui_frame_run(mui_frame *f, mui_team_fn fn, const char *path)
{
    mu_context *c = f->context;
    for (int i = 0; i < f->used; i++) {
        mui_bound *b = &f->replicas[i].bound;
        b->context = c;
        b->here = *mui_here_of(c);
        b->here.lane = i + 1;
        b->status = MU_OK;
        b->engine = f->replicas[i].tape->engine;
    }
    mui_team_run(f->owner->team, f->used, run_bound, &(job){f, fn});
    mui_engine_enter(f->main->engine);
    for (int i = 0; i < f->used; i++) {
        const mui_replica *r = &f->replicas[i];
        if (r->bound.status != MU_OK) {
            return mui_fail(c, r->bound.status, "%s%s%s, replica %d of %d (rows %lld to %lld): %.1700s", name,
                            path[0] != '\0' ? " in " : "", path, i, f->used, (long long)r->first,
                            (long long)(r->first + r->rows - 1), r->bound.message);
        }
    }
    return mui_failed(c) ? mu_context_status(c) : MU_OK;
}

static void forward_one(void *user, int i)
{
    mui_frame *f = user;
    mui_replica *r = &f->replicas[i];
    mu_tape *t = r->tape;
    mu_dims dims = f->in->dims;
    dims.dim[0] = r->rows;
    mu_tensor *x = mui_tensor_new(t, dims, f->in->dtype, NULL);
    if (x == NULL) {
        return;
    }
    size_t bytes = (size_t)mui_dims_elements(dims) * mu_dtype_bytes(x->dtype);
    if (bytes > 0) {
        size_t row = bytes / (size_t)r->rows;
        memcpy(x->data, f->in->data + (size_t)r->first * row, bytes);
    }
    x->requires_grad = x->wants_own_grad = f->wants;
    mu_tensor *y = f->fn(f->self, t, x);
    if (y == NULL && !mui_failed(f->context)) {
        mui_fail(f->context, MU_ERR_STATE, "its forward returned NULL");
    }
    if (mui_inputs_bad(t, name, &y, 1)) {
        return;
    }
    r->x = x;
    r->y = mui_in_layout(t, y->dtype == MU_BF16 ? mui_cast(t, y, MU_F32) : y, NULL);
    if (r->y != NULL && !t->options.no_grad && mui_shadows_make(t, mui_base_of(r->y)) == MU_OK) {
        /* What depends on what is settled now: the error, if any, is in the thread's own place. */
        mu_status s = mui_mark(t, mui_base_of(r->y), &t->shadows.store);
        (void)s;
    }
}

/* -- gathering -------------------------------------------------------------------------------------------------- */
/* The dims of the whole; false: they do not fit together. A scalar of each replica becomes an element. */
static bool whole_dims(mui_frame *f, mu_tape *t, mu_dims *dims)
{
    const mu_tensor *a = f->replicas[0].y;
    *dims = a->dims.ndim > 0 ? a->dims : MU_DIMS(1);
    int64_t rows = 0;
    for (int i = 0; i < f->used; i++) {
        mui_replica *r = &f->replicas[i];
        mu_dims d = r->y->dims.ndim > 0 ? r->y->dims : MU_DIMS(1);
        r->y_first = rows;
        r->y_rows = d.dim[0];
        rows += d.dim[0];
        dims->dim[0] = d.dim[0];
        if (!mui_dims_equal(d, *dims) || r->y->dims.ndim != a->dims.ndim || r->y->dtype != a->dtype) {
            char x[MUI_DIMS_TEXT], y[MUI_DIMS_TEXT];
            mui_op_fail(t, MU_ERR_SHAPE, name, "replica 0 gave %s of shape %s, replica %d %s of shape %s: they cannot be "
                        "gathered along dimension 0", mu_dtype_name(a->dtype), mui_dims_text(a->dims, x), i,
                        mu_dtype_name(r->y->dtype), mui_dims_text(r->y->dims, y));
            return false;
        }
    }
    dims->dim[0] = rows;
    return true;
}

static mu_tensor *gather(mui_frame *f, mu_tape *t)
{
    mu_dims dims;
    mu_tensor *y = whole_dims(f, t, &dims) ? mui_tensor_new(t, dims, f->replicas[0].y->dtype, NULL) : NULL;
    char *to = y != NULL ? y->data : NULL;
    for (int i = 0; y != NULL && i < f->used; i++) {
        const mu_tensor *part = f->replicas[i].y;
        size_t bytes = (size_t)mui_dims_elements(part->dims) * mu_dtype_bytes(part->dtype);
        if (bytes > 0) {
            memcpy(to, part->data, bytes);
            to += bytes;
        }
    }
    return y;
}

/* The shadow of p in a replica that depends on it, or else in the first that reads it; NULL when one before `i` has met
 * it already, so that each parameter is listed once. */
static const mu_parameter *spokesman(mui_frame *f, int i, const mu_parameter *p)
{
    for (int k = 0; k < i; k++) {
        if (mui_shadow_of(&f->replicas[k].tape->shadows, p) != NULL) {
            return NULL;
        }
    }
    const mu_parameter *first = mui_shadow_of(&f->replicas[i].tape->shadows, p);
    for (int k = i; k < f->used; k++) {
        const mu_parameter *q = mui_shadow_of(&f->replicas[k].tape->shadows, p);
        if (q != NULL && q->reads > 0) {
            return q;
        }
    }
    return first;
}

/* Not by what is counted in x: segments' reads are not. */
static bool reaches(const mui_replica *r)
{
    const mu_tape *t = r->tape;
    for (size_t i = 0; i < t->node_count; i++) {
        const mui_node *n = t->nodes[i];
        for (int k = 0; n->reaches_loss && k < n->in_count; k++) {
            if (mui_base_of(n->in[k]) == r->x) {
                return true;
            }
        }
    }
    return mui_base_of(r->y) == r->x;
}

static bool depends_on_x(const mui_frame *f)
{
    for (int i = 0; f->wants && i < f->used; i++) {
        if (reaches(&f->replicas[i])) {
            return true;
        }
    }
    return false;
}

/* Makes the list, which lies in the replicas' memory otherwise, last as long as t. */
static bool keep_within(mu_tape *t, mui_within *within, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        mui_within *w = &within[i];
        w->module = mui_arena_strdup(&t->arena, w->module);
        if (w->module == NULL) {
            return false;
        }
        if (w->absence == NULL) {
            continue;
        }
        mui_absence *a = mui_arena_alloc(&t->arena, sizeof(*a));
        if (a == NULL) {
            return false;
        }
        *a = *w->absence;
        const char **text[] = {&a->module, &a->end_module, &a->region};
        for (int k = 0; k < 3; k++) {
            *text[k] = *text[k] != NULL ? mui_arena_strdup(&t->arena, *text[k]) : NULL;
        }
        w->absence = a;
    }
    return true;
}

/* Puts the node on the main tape. */
static mu_tensor *record(mui_frame *f, mu_tape *t, mu_tensor *x, mu_tensor *y)
{
    bool again = mui_tape_recomputes(t), first = t->segment != NULL && !again;
    size_t most = 0, in_count = 0, within_count = 0;
    bool detached = false;
    for (int i = 0; i < f->used; i++) {
        most += (size_t)f->replicas[i].tape->shadows.store.count;
        detached = detached || mui_base_of(f->replicas[i].y)->detached;
    }
    mu_tensor **in = mui_arena_alloc(&t->arena, (most + 1) * sizeof(*in));
    mui_within *within = mui_arena_alloc(&t->arena, (most + 1) * sizeof(*within));
    mui_storage *token = mui_storage_new(t->pool, 1); /* what a second backward finds missing */
    if (in == NULL || within == NULL || token == NULL) {
        mui_storage_release(token);
        return NULL;
    }
    mui_parallel_attr attr;
    memset(&attr, 0, sizeof(attr));
    attr.frame = first ? NULL : f;
    attr.has_x = depends_on_x(f);
    if (attr.has_x) {
        in[in_count++] = x;
    }
    for (int i = 0; i < f->used; i++) {
        const mui_shadows *s = &f->replicas[i].tape->shadows;
        for (int64_t k = 0; k < s->store.count; k++) {
            mu_parameter *p = s->originals[k];
            const mu_parameter *q = p->frozen ? NULL : spokesman(f, i, p);
            if (q == NULL) {
                continue;
            }
            if (q->reads > 0 && y->dtype == MU_F32) {
                in[in_count++] = &p->value;
            }
            const mui_node *n = s->readers[k];
            within[within_count++] = (mui_within){.parameter = p,
                                                  .op = n != NULL ? n->op->name : name,
                                                  .module = n != NULL ? n->module : "",
                                                  .absence = q->reads > 0 ? NULL : &q->absence};
        }
    }
    if (first && !keep_within(t, within, within_count)) {
        mui_storage_release(token);
        return NULL;
    }
    f->brief = again;
    y = mui_record_within(t, &mui_op_parallel, y, in, (int)in_count, &attr, sizeof(attr), token, within, within_count,
                          detached);
    if (first) { /* as the segment drops its values */
        mui_frame_release(f);
    }
    return y;
}

/* -- the calls -------------------------------------------------------------------------------------------------- */
mui_parallel *mui_parallel_new(mu_context *c, int replicas)
{
    mui_parallel *p = mui_failed(c) ? NULL : mui_calloc(c, 1, sizeof(*p));
    if (p == NULL) {
        return NULL;
    }
    p->context = c;
    p->count = replicas;
    p->engines = mui_calloc(c, (size_t)replicas, sizeof(mui_engine *));
    if (p->engines == NULL) {
        mui_free(c, p);
        return NULL;
    }
    return p;
}

void mui_parallel_free(mui_parallel *p)
{
    if (p == NULL) {
        return;
    }
    mui_team_free(p->team);
    for (mui_frame *f = p->frames; f != NULL;) {
        mui_frame *next = f->next;
        if (f->main == NULL) {
            free_frame(f, p->count);
        } else {
            for (int i = f->used; i < p->count; i++) {
                mu_tape_free(f->replicas[i].tape);
            }
            f->owner = NULL;
        }
        f = next;
    }
    for (int i = 0; i < p->count; i++) {
        mui_engine_join(p->engines[i]);
    }
    mui_free(p->context, p->engines);
    mui_free(p->context, p);
}

mu_tensor *mui_parallel_forward(mui_parallel *p, mu_tape *t, mui_parallel_fn fn, void *self, mu_tensor *x)
{
    if (p->count == 1 || (t != NULL && t->replica)) {
        return fn(self, t, x);
    }
    if (mui_inputs_bad(t, name, &x, 1)) {
        return NULL;
    }
    if (x->dims.ndim < 1) {
        return mui_op_fail(t, MU_ERR_SHAPE, name, "a scalar has no rows to scatter");
    }
    double began = mui_now();
    t->began = t->began == 0 ? began : t->began;
    mu_tensor *in = mui_in_layout(t, x->dtype == MU_BF16 ? mui_cast(t, x, MU_F32) : x, NULL);
    mui_frame *f = in != NULL ? take_frame(p, t, x->dims.dim[0]) : NULL;
    if (f == NULL) {
        return NULL;
    }
    f->fn = fn;
    f->self = self;
    f->in = in;
    f->wants = in->dtype == MU_F32 && mui_will_record(t, &in, 1);
    if (mui_frame_run(f, forward_one, mui_here_of(p->context)->path) != MU_OK) {
        return NULL;
    }
    mu_tensor *y = gather(f, t);
    if (y == NULL) {
        return NULL;
    }
    if (!mui_tape_recomputes(t)) {
        mui_frame_settle(f);
    }
    return t->options.no_grad ? y : record(f, t, in, y);
}
