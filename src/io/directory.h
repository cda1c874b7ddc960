/* Folders in the place of files. */
#ifndef MUI_DIRECTORY_H
#define MUI_DIRECTORY_H

#include "base/context.h"

/* MU_OK when path is no folder; else MU_ERR_IO that names the checkpoints in it. */
mu_status mui_refuse_directory(mu_context *c, const char *path) MU_MUST_USE;

#endif
