/* Comparing two tensors element by element, for `muster diff`. */
#ifndef MUSTER_CLI_DIFF_VALUES_H
#define MUSTER_CLI_DIFF_VALUES_H

#include "look.h"

typedef enum values_status { VALUES_EQUAL = 0, VALUES_DIFFER, VALUES_SHAPE, VALUES_INCOMPARABLE } values_status;

typedef struct values_diff {
    values_status status;
    int64_t elements, differ, nan_on_one_side;
    double max_abs, max_rel; /* infinite where one side alone is NaN or infinite */
    int64_t worst;           /* element of max_abs, row-major; -1: none differs at all */
    bool no_numbers;         /* of a type whose values are not known: only bits were compared */
    const char *why;         /* incomparable */
} values_diff;

/* False on an error, which the context or stderr then has. */
bool values_compare(look *l, mu_checkpoint_file *a, int64_t i, mu_checkpoint_file *b, int64_t at, double rtol, double atol,
                    values_diff *out);
const char *values_status_name(values_status s);
/* The index of a row-major element in each dimension; returns their number. */
int values_index(mu_dims d, int64_t element, int64_t *out);

#endif
