/* Globs over dotted names. */
#include "base/glob.h"

#include <fnmatch.h>

bool mui_glob_match(const char *pattern, const char *name)
{
    return fnmatch(pattern, name, 0) == 0;
}
