/* The arithmetic of PowerSGD. Every result here that has to be the same on all ranks is a function of numbers that are:
 * plain loops, one thread. Not for: the state and what travels (hook_powersgd.c). */
#ifndef MUI_HOOK_POWERSGD_H
#define MUI_HOOK_POWERSGD_H

#include <stdbool.h>
#include <stdint.h>

/* m: rows by columns, row-major. p and q: rank columns of rows and of columns numbers, one column after the other. */
void mui_powersgd_p(const float *m, const float *q, float *p, int64_t rows, int64_t columns, int64_t rank);
void mui_powersgd_q(const float *m, const float *p, float *q, int64_t rows, int64_t columns, int64_t rank);
/* m = P Q' */
void mui_powersgd_restore(float *m, const float *p, const float *q, int64_t rows, int64_t columns, int64_t rank);
/* Gram-Schmidt on `rank` columns of n. A column that is zero stays so. */
void mui_powersgd_orthogonalise(float *a, int64_t n, int64_t rank, double epsilon);
/* A warm start from these would lose a direction for good: a column is zero, or something is not finite. */
bool mui_powersgd_useless(const float *a, int64_t n, int64_t rank);

#endif
