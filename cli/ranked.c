/* Logging and ending of commands that run on ranks. */
#include "ranked.h"
#include "commands.h"

void ranked_log(FILE *to, const char *command, int rank, int size, mu_log_level level, const char *message)
{
    if (level == MU_LOG_ERROR) {
        return;
    }
    const char *what = level == MU_LOG_WARN ? "warning: " : "";
    if (size > 1) {
        fprintf(to, "muster %s: rank %d: %s%s\n", command, rank, what, message);
    } else {
        fprintf(to, "muster %s: %s%s\n", command, what, message);
    }
}

static bool is_bad_input(mu_status status)
{
    switch (status) {
    case MU_ERR_ARG:
    case MU_ERR_SHAPE:
    case MU_ERR_DTYPE:
    case MU_ERR_IO:
    case MU_ERR_FORMAT:
    case MU_ERR_STATE:
    case MU_ERR_UNSUPPORTED:
    case MU_ERR_LIMIT: return true;
    default: return false;
    }
}

int ranked_close(mu_context *c, const char *command, int rank, int size, int code, bool early)
{
    mu_status status = mu_context_status(c);
    if (status < 0) {
        /* Every rank says it: the launcher may end the others before rank 0 would. With --ranks bad input was found
         * before any rank was started. */
        char who[32] = "";
        if (size > 1) {
            snprintf(who, sizeof(who), "rank %d: ", rank);
        }
        cli_fail(command, code, "%s%s", who, mu_context_message(c));
        code = early && is_bad_input(status) ? CLI_USAGE : CLI_FAILED;
    }
    mu_status closed = mu_context_close(c);
    if (status == MU_OK && closed < 0) {
        code = cli_fail(command, CLI_FAILED, "closing: %s", mu_status_name(closed));
    }
    return code;
}
