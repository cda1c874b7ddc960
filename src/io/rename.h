/* Rules "FROM=TO" that change names: FROM is a POSIX extended regular expression, and every place in a name that it
 * matches becomes TO. In TO, \0 is what was matched, \1 to \9 its groups, \\ a backslash; & is not special. The first =
 * ends FROM; \= in FROM is a =. Rules are applied in order, each to what the one before left. */
#ifndef MUI_RENAME_H
#define MUI_RENAME_H

#include "base/arena.h"

typedef struct mui_renames mui_renames;

/* rules: NULL-terminated; NULL or no rules: *out is NULL, which the others take. A rule that cannot be read is
 * MU_ERR_ARG with its text. The texts are borrowed. */
mu_status mui_renames_open(mu_context *c, const char *const *rules, mui_renames **out) MU_MUST_USE;
void mui_renames_close(mui_renames *r);
/* The new name of `name`: itself where no rule matched, else in the arena. MU_ERR_LIMIT when it would be longer than
 * MUI_MAX_NAME_BYTES; what: the file, for messages. */
mu_status mui_renames_apply(mui_renames *r, const char *what, const char *name, mui_arena *arena,
                            const char **out) MU_MUST_USE;
/* The same for n names; NULL names stay NULL. Two names that become one are MU_ERR_FORMAT with both. */
mu_status mui_renames_apply_all(mui_renames *r, const char *what, const char *const *names, size_t n, mui_arena *arena,
                                const char **out) MU_MUST_USE;
/* Forgets which rules have matched something. */
void mui_renames_restart(mui_renames *r);
/* A warning for each rule that has matched nothing since. */
void mui_renames_warn_unused(const mui_renames *r, const char *what);

#endif
