/* `muster eval`: accuracy and loss of a checkpoint. */
#include "commands.h"
#include "relaunch.h"
#include "session.h"

#include <string.h>

int cmd_eval(int argc, char **argv)
{
    static train_options o;
    static session s;
    int code = eval_options_parse(&o, argc, argv);
    if (code >= 0) {
        return code;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    bool start_ranks = o.ranks > 1 && !in_launcher();
    int64_t ranks = o.ranks;
    code = session_open(&s, &o, start_ranks);
    if (code < 0) {
        code = session_setup_eval(&s);
    }
    if (code >= 0) {
        return code;
    }
    if (start_ranks) {
        code = session_close(&s, CLI_OK, true);
        return code != CLI_OK ? code : relaunch((int)ranks, 0, argc, argv);
    }
    score found;
    char correct[32], count[32];
    if (!session_evaluate(&s, &found)) {
        return session_close(&s, CLI_FAILED, false);
    }
    if (s.rank == 0) {
        printf("test accuracy %.2f %% (%s of %s), loss %.4f%s\n",
               100.0 * (double)found.correct / (double)found.count, with_commas(found.correct, correct),
               with_commas(found.count, count), found.loss, s.no_test ? " (on all the data: no test part)" : "");
    }
    return session_close(&s, CLI_OK, false);
}
