/* Where each thread is, as spans that nest: a stage (forward, backward, ...), modules by the parts of their paths, and the
 * program's own spans between them. Each move closes what is left and opens what is entered, so that spans of a thread
 * nest whatever the program does. */
#include "base/alloc.h"
#include "base/trace_state.h"

#include <string.h>

int mui_trace_lane_of(mu_context *c)
{
    mui_trace *t = c->trace;
    int lane = mui_here_of(c)->lane;
    if (lane >= MUI_TRACE_LANES) {
        return -1;
    }
    if (t->lanes[lane] == NULL) {
        t->lanes[lane] = mui_calloc(NULL, 1, sizeof(*t->lanes[lane])); /* each is its own thread's */
    }
    return t->lanes[lane] != NULL ? lane : -1;
}

static void close_down_to(mui_trace *t, int lane, int depth, int64_t now)
{
    mui_trace_lane *l = t->lanes[lane];
    while (l->depth > depth) {
        const mui_trace_frame *f = &l->frames[--l->depth];
        mui_trace_record r = {.name = f->name, .path = f->file, .began = f->began, .took = now - f->began,
                              .kind = f->kind, .lane = (uint16_t)lane, .index = -1};
        if (r.name != NULL) {
            mui_trace_put(t, &r);
        }
    }
}

static void open_frame(mui_trace_lane *l, const mui_trace_frame *f)
{
    if (l->depth < MUI_TRACE_DEPTH) {
        l->frames[l->depth++] = *f;
    }
}

static mui_trace_kind kind_of(mui_stage stage, bool module)
{
    switch (stage) {
    case MUI_FORWARD: return module ? MUI_TRACE_FORWARD_MODULE : MUI_TRACE_FORWARD;
    case MUI_BACKWARD: return module ? MUI_TRACE_BACKWARD_MODULE : MUI_TRACE_BACKWARD;
    case MUI_OPTIMISER: return MUI_TRACE_OPTIMIZER;
    case MUI_LOADER: return MUI_TRACE_DATA;
    case MUI_SAVING:
    case MUI_READING: return MUI_TRACE_CHECKPOINT;
    case MUI_ELSEWHERE: break;
    }
    return MUI_TRACE_USER;
}

static const char *stage_name(mui_stage stage, bool within_backward)
{
    switch (stage) {
    case MUI_FORWARD: return within_backward ? "forward again" : "forward";
    case MUI_BACKWARD: return "backward";
    case MUI_OPTIMISER: return "optimizer step";
    case MUI_LOADER: return "wait for a batch";
    case MUI_SAVING: return "save";
    case MUI_READING: return "load";
    case MUI_ELSEWHERE: break;
    }
    return "";
}

/* The innermost frame of that stage, -1 if it is not open. */
static int find_stage(const mui_trace_lane *l, mui_stage stage)
{
    int i = l->depth - 1;
    while (i >= 0 && (l->frames[i].what != MUI_FRAME_STAGE || l->frames[i].stage != stage)) {
        i--;
    }
    return i;
}

static bool leads_to(const mui_trace_frame *f, const char *path)
{
    size_t n = f->name != NULL ? f->name->length : 0;
    return n > 0 && strncmp(f->name->plain, path, n) == 0 && (path[n] == '.' || path[n] == '\0');
}

/* How many of the open frames stay open; *length: how much of path they already stand for. */
static int kept(const mui_trace_lane *l, mui_stage stage, const char *path, size_t *length)
{
    int from = stage != MUI_ELSEWHERE ? find_stage(l, stage) : -1, i = from + 1;
    *length = 0;
    if (from < 0) { /* a stage within another goes on top; elsewhere is below all of them */
        for (i = stage == MUI_ELSEWHERE ? 0 : l->depth; i < l->depth && l->frames[i].what == MUI_FRAME_USER; i++) {
        }
        return i;
    }
    for (; i < l->depth; i++) {
        const mui_trace_frame *f = &l->frames[i];
        if (f->what == MUI_FRAME_STAGE || (f->what == MUI_FRAME_PART && !leads_to(f, path))) {
            break;
        }
        *length = f->what == MUI_FRAME_PART ? f->name->length : *length;
    }
    return i;
}

void mui_trace_move(mu_context *c, mui_here *here, mui_stage stage, const char *path)
{
    mui_trace *t = c->trace;
    int lane = mui_trace_lane_of(c);
    if (lane < 0 || lane != here->lane) {
        return;
    }
    mui_trace_lane *l = t->lanes[lane];
    int64_t now = mui_trace_now();
    bool modules = stage == MUI_FORWARD || stage == MUI_BACKWARD;
    size_t known, length = strlen(path);
    int stay = kept(l, stage, modules ? path : "", &known);
    close_down_to(t, lane, stay, now);
    if (stage == MUI_ELSEWHERE) {
        return;
    }
    if (find_stage(l, stage) < 0) {
        const char *name = stage_name(stage, find_stage(l, MUI_BACKWARD) >= 0);
        mui_trace_frame f = {.what = MUI_FRAME_STAGE, .stage = stage, .kind = (uint8_t)kind_of(stage, false), .began = now,
                             .name = mui_trace_name_of(t, name, strlen(name)),
                             .file = !modules && length > 0 ? mui_trace_name_of(t, path, length) : NULL};
        open_frame(l, &f);
    }
    while (modules && known < length) {
        const char *dot = strchr(path + known + (known > 0), '.');
        known = dot != NULL ? (size_t)(dot - path) : length;
        mui_trace_frame f = {.what = MUI_FRAME_PART, .stage = stage, .kind = (uint8_t)kind_of(stage, true), .began = now,
                             .name = mui_trace_name_of(t, path, known)};
        open_frame(l, &f);
    }
}

void mui_trace_settle(mu_context *c)
{
    int lane = mui_trace_lane_of(c);
    if (lane > 0) {
        close_down_to(c->trace, lane, 0, mui_trace_now());
    }
}

void mui_trace_push(mu_context *c, const char *name)
{
    mui_trace *t = c->trace;
    int lane = mui_trace_lane_of(c);
    if (lane < 0) {
        return;
    }
    mui_trace_lane *l = t->lanes[lane];
    mui_trace_frame f = {.what = MUI_FRAME_USER, .kind = MUI_TRACE_USER, .name = mui_trace_name_of(t, name, strlen(name)),
                         .began = mui_trace_now()};
    l->unseen += l->depth == MUI_TRACE_DEPTH;
    open_frame(l, &f);
}

void mui_trace_pop(mu_context *c)
{
    mui_trace *t = c->trace;
    int lane = mui_trace_lane_of(c);
    if (lane < 0) {
        return;
    }
    mui_trace_lane *l = t->lanes[lane];
    if (l->unseen > 0) {
        l->unseen--;
        return;
    }
    int i = l->depth - 1;
    while (i >= 0 && l->frames[i].what != MUI_FRAME_USER) {
        i--;
    }
    if (i >= 0) {
        close_down_to(t, lane, i, mui_trace_now());
    }
}

void mui_trace_close_lanes(mui_trace *t)
{
    int64_t now = mui_trace_now();
    for (int i = 0; i < MUI_TRACE_LANES; i++) {
        if (t->lanes[i] != NULL) {
            close_down_to(t, i, 0, now);
        }
    }
}

void mui_trace_free_lanes(mui_trace *t)
{
    mui_free(t->context, t->lanes[0]);
    for (int i = 1; i < MUI_TRACE_LANES; i++) {
        mui_free(NULL, t->lanes[i]);
    }
}
