/* What the tests of kernels share: engines of both kinds, random data, comparisons, and tensors in layouts. */
#ifndef KERN_UTIL_H
#define KERN_UTIL_H

#include "base/alloc.h"
#include "base/rng.h"
#include "kern/kern.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

/* Two contexts: plain C, and the default kernels. */
enum { REFERENCE, DEFAULT, KINDS };
typedef struct engines {
    mu_context *c[KINDS];
    mui_engine *e[KINDS];
} engines;
int engines_open(void **state);
int engines_close(void **state);

/* Memory of a test, freed when it ends. */
float *floats(mu_context *c, int64_t n);
float *random_floats(mu_context *c, int64_t n, uint64_t seed); /* normal */
void free_floats(mu_context *c);

/* |a - b| <= bound * (scale + |b|), and NaN only against NaN; says where and what otherwise. */
void assert_close(const char *what, const float *a, const double *b, int64_t n, double bound, double scale);
void assert_close_f(const char *what, const float *a, const float *b, int64_t n, double bound, double scale);
void assert_same_bits(const char *what, const void *a, const void *b, size_t bytes);

/* plain in another layout: new memory, or a copy. */
float *to_layout(mui_engine *e, mu_context *c, mu_dims dims, const mui_layout *layout, const float *plain);
float *from_layout(mui_engine *e, mu_context *c, mu_dims dims, const mui_layout *layout, const float *data);
/* Memory in that layout filled with a pattern that nobody may leave in the padding. */
float *dirty(mu_context *c, mu_dims dims, const mui_layout *layout);
/* All padding of data is zero. */
void assert_padding_zero(const char *what, mui_engine *e, mu_context *c, mu_dims dims, const mui_layout *layout,
                         const float *data);
int64_t count_of(mu_dims dims);

#endif
