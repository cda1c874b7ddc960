/* What all data sets share, sets kept in memory, and sets of the user's own. */
#include "data/dataset.h"
#include "base/alloc.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define MAX_SIDE 8192

mu_dataset *mui_dataset_make(mu_context *c, const mui_dataset_kind *kind)
{
    mu_dataset *d = mui_calloc(c, 1, sizeof(*d));
    if (d != NULL) {
        d->context = c;
        d->kind = kind;
        d->scratch.context = c;
    }
    return d;
}

void mui_dataset_destroy(mu_dataset *d)
{
    mu_context *c = d->context;
    if (d->kind->destroy != NULL) {
        d->kind->destroy(d);
    }
    for (int i = 0; d->class_names != NULL && i < d->classes; i++) {
        mui_free(c, d->class_names[i]);
    }
    mui_free(c, d->class_names);
    mui_free(c, d->pixels);
    mui_free(c, d->labels);
    mui_free(c, d->is_bad);
    mui_scratch_free(&d->scratch);
    mui_free(c, d);
}

static void destroy_owned(void *object)
{
    mui_dataset_destroy(object);
}

mu_dataset *mui_dataset_finish(mu_dataset *d)
{
    mu_context *c = d->context;
    size_t elements = 1, bytes = 0;
    bool fits = d->dims.ndim >= 0 && d->dims.ndim < MU_MAX_DIMS; /* a batch has one dimension more */
    for (int i = 0; fits && i < d->dims.ndim; i++) {
        fits = d->dims.dim[i] > 0 && mui_size_mul(elements, (size_t)d->dims.dim[i], &elements);
    }
    if (!fits || !mui_size_mul(elements, sizeof(float), &bytes) || bytes > (size_t)PTRDIFF_MAX) {
        mui_fail(c, MU_ERR_SHAPE,
                 "a sample of a data set needs at most %d dimensions, each at least 1, and must fit into memory",
                 MU_MAX_DIMS - 1);
        goto destroy;
    }
    d->elements = (int64_t)elements;
    if (d->skip_bad) {
        d->is_bad = mui_calloc(c, (size_t)d->count, 1);
        if (d->is_bad == NULL) {
            goto destroy;
        }
    }
    /* On failure the context destroys it. */
    return mui_context_own(c, d, destroy_owned, MUI_OWN_DEFAULT) == MU_OK ? d : NULL;
destroy:
    mui_dataset_destroy(d);
    return NULL;
}

bool mui_dataset_options(mu_context *c, const mu_dataset_options *options, mu_dataset_options *o)
{
    *o = options != NULL ? *options : (mu_dataset_options){0};
    if (o->split != MU_SPLIT_TRAIN && o->split != MU_SPLIT_TEST) {
        mui_fail(c, MU_ERR_ARG, "data set option split is %d: expected MU_SPLIT_TRAIN or MU_SPLIT_TEST", (int)o->split);
        return false;
    }
    if (o->first_classes < 0) {
        mui_fail(c, MU_ERR_ARG, "data set option first_classes is %d: expected 0 (all) or more", o->first_classes);
        return false;
    }
    o->side = o->side == 0 ? 224 : o->side;
    if (o->side < 1 || o->side > MAX_SIDE) {
        mui_fail(c, MU_ERR_ARG, "data set option side is %d: expected 1 to %d", o->side, MAX_SIDE);
        return false;
    }
    o->channels = o->channels == 0 ? 3 : o->channels;
    if (o->channels != 1 && o->channels != 3) {
        mui_fail(c, MU_ERR_ARG, "data set option channels is %d: expected 1 or 3", o->channels);
        return false;
    }
    return true;
}

mu_status mui_dataset_filter(mu_dataset *d, int first, const char *where)
{
    if (first == 0 || first >= d->classes) {
        return MU_OK;
    }
    size_t each = (size_t)d->elements;
    int64_t kept = 0;
    for (int64_t i = 0; i < d->count; i++) {
        if (d->labels[i] < first) {
            if (kept != i) {
                d->labels[kept] = d->labels[i];
                memcpy(d->pixels + (size_t)kept * each, d->pixels + (size_t)i * each, each);
            }
            kept++;
        }
    }
    if (kept == 0) {
        return mui_fail(d->context, MU_ERR_FORMAT, "%s: none of its %" PRId64 " samples has a label below %d", where,
                        d->count, first);
    }
    for (int i = first; d->class_names != NULL && i < d->classes; i++) {
        mui_free(d->context, d->class_names[i]);
    }
    d->count = kept;
    d->classes = first;
    return MU_OK;
}

void mui_dataset_sample_name(const mu_dataset *d, int64_t i, char *out, size_t out_bytes)
{
    if (d->kind->name != NULL) {
        d->kind->name(d, i, out, out_bytes);
    } else {
        snprintf(out, out_bytes, "sample %" PRId64, i);
    }
}

bool mui_dataset_note_bad(mu_dataset *d, int64_t i)
{
    if (d->is_bad[i]) {
        return false;
    }
    d->is_bad[i] = 1;
    d->bad++;
    return true;
}

static mu_status bytes_from_memory(mu_dataset *d, mui_scratch *s, int64_t i, const uint8_t **pixels, int64_t *label,
                                   mui_trouble *trouble)
{
    (void)s;
    (void)trouble;
    *pixels = d->pixels + (size_t)i * (size_t)d->elements;
    *label = d->labels[i];
    return MU_OK;
}

const mui_dataset_kind mui_bytes_kind = {.bytes = bytes_from_memory};

/* -- sets of the user's own --------------------------------------------------------------------------------------- */
static mu_status floats_from_user(mu_dataset *d, int64_t i, float *x, int64_t *label, mui_trouble *trouble)
{
    const mu_dataset_source *source = d->state;
    mu_status s = source->get(source->user, i, x, label);
    if (s < 0) {
        return mui_trouble_set(trouble, s, "the data set's get returned \"%s\"", mu_status_name(s));
    }
    return MU_OK;
}

static void destroy_user(mu_dataset *d)
{
    mu_dataset_source *source = d->state;
    if (source != NULL && source->destroy != NULL) {
        source->destroy(source->user);
    }
    mui_free(d->context, source);
}

static const mui_dataset_kind user_kind = {.floats = floats_from_user, .destroy = destroy_user};

/* The source is the context's from the call on, whatever becomes of the call. */
static mu_dataset *refuse_source(const mu_dataset_source *source)
{
    if (source != NULL && source->destroy != NULL) {
        source->destroy(source->user);
    }
    return NULL;
}

mu_dataset *mu_dataset_new(mu_context *c, const mu_dataset_source *source)
{
    if (mui_failed(c)) {
        return refuse_source(source);
    }
    if (source == NULL || source->get == NULL || source->count < 1 || source->classes < 0) {
        mui_fail(c, MU_ERR_ARG, "a data set needs a get function, at least one sample and classes >= 0 (found %" PRId64
                 " samples, %d classes)", source != NULL ? source->count : 0, source != NULL ? source->classes : 0);
        return refuse_source(source);
    }
    mu_dataset *d = mui_dataset_make(c, &user_kind);
    if (d == NULL) {
        return refuse_source(source);
    }
    mu_dataset_source *copy = mui_alloc(c, sizeof(*copy));
    if (copy == NULL) {
        mui_dataset_destroy(d);
        return refuse_source(source);
    }
    *copy = *source;
    d->state = copy;
    d->count = source->count;
    d->dims = source->dims;
    d->classes = source->classes;
    return mui_dataset_finish(d);
}

/* -- public, common ------------------------------------------------------------------------------------------------ */
mu_dataset *mu_dataset_open(mu_context *c, const char *spec, const mu_dataset_options *options)
{
    static const struct {
        const char *prefix;
        mu_dataset *(*open)(mu_context *, const char *, const mu_dataset_options *);
    } kinds[] = {{"idx:", mu_idx_dataset}, {"cifar:", mu_cifar_dataset}, {"folder:", mu_image_folder}};
    if (mui_failed(c)) {
        return NULL;
    }
    for (size_t i = 0; spec != NULL && i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        size_t length = strlen(kinds[i].prefix);
        if (strncmp(spec, kinds[i].prefix, length) == 0 && spec[length] != '\0') {
            return kinds[i].open(c, spec + length, options);
        }
    }
    mui_fail(c, MU_ERR_ARG, "data set \"%s\": expected idx:DIR, cifar:DIR or folder:DIR", spec != NULL ? spec : "");
    return NULL;
}

int64_t mu_dataset_count(const mu_dataset *d)
{
    return d != NULL ? d->count : 0;
}

int mu_dataset_classes(const mu_dataset *d)
{
    return d != NULL ? d->classes : 0;
}

mu_dims mu_dataset_dims(const mu_dataset *d)
{
    return d != NULL ? d->dims : MU_SCALAR;
}

const char *mu_dataset_class_name(const mu_dataset *d, int label)
{
    return d != NULL && d->class_names != NULL && label >= 0 && label < d->classes ? d->class_names[label] : "";
}

int64_t mu_dataset_bad(const mu_dataset *d)
{
    return d != NULL ? d->bad : 0;
}

mu_status mu_dataset_get(mu_dataset *d, int64_t i, float *x, int64_t *label)
{
    if (d == NULL) {
        return MU_ERR_ARG; /* the builder that returned NULL has raised why */
    }
    if (i < 0 || i >= d->count || x == NULL || label == NULL) {
        return mui_fail(d->context, MU_ERR_ARG, "sample %" PRId64 " of a data set of %" PRId64 "%s", i, d->count,
                        x == NULL || label == NULL ? ", without a place to write it to" : "");
    }
    mui_trouble trouble = {MU_OK, ""};
    const uint8_t *pixels = NULL;
    int64_t found = 0;
    mu_status s = d->kind->bytes != NULL ? d->kind->bytes(d, &d->scratch, i, &pixels, &found, &trouble)
                                         : d->kind->floats(d, i, x, &found, &trouble);
    if (s != MU_OK) {
        char name[1024];
        mui_dataset_sample_name(d, i, name, sizeof(name));
        return mui_fail(d->context, s, "%s: %s", name, trouble.text);
    }
    for (int64_t k = 0; pixels != NULL && k < d->elements; k++) {
        x[k] = (float)pixels[k] / 255.0f;
    }
    *label = found;
    return MU_OK;
}
