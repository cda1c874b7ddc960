/* Shell globs over dotted names: fnmatch without special treatment of dots and slashes. */
#ifndef MUI_GLOB_H
#define MUI_GLOB_H

#include <stdbool.h>

bool mui_glob_match(const char *pattern, const char *name);

#endif
