/* An error that is not raised yet: see dataset.h for why samples are read without touching the context. */
#ifndef MUI_TROUBLE_H
#define MUI_TROUBLE_H

#include <muster/base.h>

typedef struct mui_trouble {
    mu_status status;
    char text[232]; /* what was wrong, without the name of the file */
} mui_trouble;

/* Writes both and returns status, for `return mui_trouble_set(...)`. */
mu_status mui_trouble_set(mui_trouble *t, mu_status status, const char *format, ...) MU_PRINTF(3, 4);

#endif
