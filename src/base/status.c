/* Names of status codes and the version. */
#include <muster/base.h>

#ifndef MUI_VERSION
#error "MUI_VERSION comes from the build"
#endif

const char *mu_version(void)
{
    return MUI_VERSION;
}

const char *mu_status_name(mu_status s)
{
    switch (s) {
    case MU_OK: return "ok";
    case MU_SKIPPED: return "skipped";
    case MU_ERR_NOMEM: return "out of memory";
    case MU_ERR_ARG: return "argument";
    case MU_ERR_SHAPE: return "shape";
    case MU_ERR_DTYPE: return "dtype";
    case MU_ERR_STATE: return "state";
    case MU_ERR_IO: return "input/output";
    case MU_ERR_FORMAT: return "format";
    case MU_ERR_UNSUPPORTED: return "unsupported";
    case MU_ERR_TIMEOUT: return "timeout";
    case MU_ERR_PEER: return "peer";
    case MU_ERR_COMM: return "communication";
    case MU_ERR_DEVICE: return "device";
    case MU_ERR_LIMIT: return "limit";
    case MU_ERR_INTERNAL: return "internal";
    }
    return "unknown";
}
