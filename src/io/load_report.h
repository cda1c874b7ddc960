/* Texts that a load or a conversion leaves with the context until its next one. */
#ifndef MUI_LOAD_REPORT_H
#define MUI_LOAD_REPORT_H

#include "base/context.h"

/* Copies text, replacing the one of this kind from before; NULL on failure. */
typedef enum mui_kept { MUI_KEPT_REPORT, MUI_KEPT_REMOVED, MUI_KEPT_ADDED, MUI_KEPT_NOTE, MUI_KEPT_CONVERSION, MUI_KEPT_COUNT } mui_kept;
const char *mui_keep_text(mu_context *c, mui_kept kind, const char *text);

#endif
