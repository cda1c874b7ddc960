/* Errors to be raised later. */
#include "data/trouble.h"

#include <stdarg.h>
#include <stdio.h>

mu_status mui_trouble_set(mui_trouble *t, mu_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(t->text, sizeof(t->text), format, args);
    va_end(args);
    t->status = status;
    return status;
}
