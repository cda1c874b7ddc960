/* Options of `muster run`, which are torchrun's where torchrun has them, with hyphens or underscores. */
#define _GNU_SOURCE
#include "commands.h"
#include "run.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char help_text[] =
    "usage: muster run [-n N] [options] [--] program [args...]\n"
    "\n"
    "Starts N copies (ranks) of a program on this machine, which find each other through the environment, and ends\n"
    "all of them when one fails. The exit code is that of the first rank that failed, 128 + signal if it was killed.\n"
    "\n"
    "  -n, --nproc-per-node N  ranks to start: a number, `cpu` or `auto` for one per CPU that may be used, `gpu` for\n"
    "                          one per GPU of NVIDIA's (default: 1)\n"
    "      --log-dir DIR       each rank's output to DIR/rank-R.log; only rank 0's also to the terminal\n"
    "  -r, --redirects WHICH   only into those files: 1 standard output, 2 standard error, 3 both, of all ranks, or of\n"
    "                          some, as 0:3,1:2; without --log-dir in a new directory, which is told\n"
    "  -t, --tee WHICH         into the files and to the terminal\n"
    "      --local-ranks-filter LIST\n"
    "                          only these ranks' output to the terminal, as 0,2\n"
    "      --max-restarts K    when a rank fails, start all ranks again, at most K times (default: 0)\n"
    "      --shutdown-timeout S\n"
    "                          seconds that ranks have to end, before they are killed (default: 30 after a signal,\n"
    "                          5 when another rank failed)\n"
    "      --master-addr HOST  MASTER_ADDR for the program (default: 127.0.0.1)\n"
    "      --master-port PORT  MASTER_PORT for the program (default: a free one)\n"
    "      --role NAME         ROLE_NAME for the program (default: default)\n"
    "      --rdzv-id ID        TORCHELASTIC_RUN_ID for the program (default: MUSTER_JOB's)\n"
    "      --standalone, --no-python, --nnodes 1, --node-rank 0, --rdzv-backend, --rdzv-endpoint, --rdzv-conf,\n"
    "      --monitor-interval, --start-method, --local-addr, --signals-to-handle\n"
    "                          accepted, as torchrun has them; they change nothing on one machine\n"
    "  -h, --help              print this\n"
    "\n"
    "Ranks see RANK, WORLD_SIZE, LOCAL_RANK and the other variables of torchrun, MUSTER_JOB, and OMP_NUM_THREADS=1\n"
    "unless it is set or there is one rank. Lines of ranks other than 0 are printed with `[rank] ` before them.\n"
    "SIGINT, SIGTERM, SIGHUP and SIGQUIT are passed on to all ranks, which then have to end; SIGUSR1 and SIGUSR2 are\n"
    "passed on too, and what comes of it is theirs to say.\n";

typedef enum option_kind {
    OPT_RANKS,
    OPT_NODES,
    OPT_NODE_RANK,
    OPT_RESTARTS,
    OPT_TIMEOUT,
    OPT_PORT,
    OPT_TEXT,       /* a const char * at `offset` */
    OPT_MASK,       /* the same, checked to be a list of streams */
    OPT_FILTER,     /* the same, a list of ranks */
    OPT_SWITCH,     /* without a value, and without a meaning here */
    OPT_IGNORED,    /* with a value, and without a meaning here */
    OPT_REFUSED     /* torchrun's, for Python only */
} option_kind;

typedef struct option_row {
    const char *name;
    char letter;
    option_kind kind;
    size_t offset;
} option_row;

#define AT(field) offsetof(launch, field)
static const option_row table[] = {
    {"--nproc-per-node", 'n', OPT_RANKS, 0},
    {"--log-dir", 0, OPT_TEXT, AT(log_dir)},
    {"--redirects", 'r', OPT_MASK, AT(redirects)},
    {"--tee", 't', OPT_MASK, AT(tee)},
    {"--local-ranks-filter", 0, OPT_FILTER, AT(filter)},
    {"--max-restarts", 0, OPT_RESTARTS, 0},
    {"--shutdown-timeout", 0, OPT_TIMEOUT, 0},
    {"--master-addr", 0, OPT_TEXT, AT(master_addr)},
    {"--master-port", 0, OPT_PORT, AT(master_port)},
    {"--role", 0, OPT_TEXT, AT(role)},
    {"--rdzv-id", 0, OPT_TEXT, AT(run_id)},
    {"--nnodes", 0, OPT_NODES, 0},
    {"--node-rank", 0, OPT_NODE_RANK, 0},
    {"--standalone", 0, OPT_SWITCH, 0},
    {"--no-python", 0, OPT_SWITCH, 0},
    {"--rdzv-backend", 0, OPT_IGNORED, 0},
    {"--rdzv-endpoint", 0, OPT_IGNORED, 0},
    {"--rdzv-conf", 0, OPT_IGNORED, 0},
    {"--monitor-interval", 0, OPT_IGNORED, 0},
    {"--start-method", 0, OPT_IGNORED, 0},
    {"--local-addr", 0, OPT_IGNORED, 0},
    {"--signals-to-handle", 0, OPT_IGNORED, 0},
    {"--module", 'm', OPT_REFUSED, 0},
    {"--run-path", 0, OPT_REFUSED, 0},
};
enum { OPTIONS = sizeof(table) / sizeof(*table) };

static bool whole_number(const char *s, int least, int most, int *out)
{
    char *end = NULL;
    errno = 0;
    long n = strtol(s, &end, 10);
    if (end == s || *end != '\0' || errno != 0 || n < least || n > most) {
        return false;
    }
    *out = (int)n;
    return true;
}

/* -- how many ---------------------------------------------------------------------------------------------------- */
static int count_cpus(void)
{
    cpu_set_t cpus;
    return sched_getaffinity(0, sizeof(cpus), &cpus) == 0 ? CPU_COUNT(&cpus) : 1;
}

/* NVIDIA's, those that CUDA_VISIBLE_DEVICES lists where it is set; its driver need not be one that works. */
static int count_gpus(void)
{
    const char *listed = getenv("CUDA_VISIBLE_DEVICES");
    int n = 0;
    if (listed != NULL) {
        bool named = false;
        for (const char *p = listed; *p != '\0'; p++) {
            n += *p != ',' && !named;
            named = *p != ',';
        }
        return strcmp(listed, "-1") == 0 ? 0 : n;
    }
    DIR *d = opendir("/proc/driver/nvidia/gpus");
    for (struct dirent *e; d != NULL && (e = readdir(d)) != NULL;) {
        n += e->d_name[0] != '.';
    }
    if (d != NULL) {
        closedir(d);
    }
    return n;
}

static int set_ranks(launch *l, const char *value)
{
    if (strcmp(value, "auto") == 0 || strcmp(value, "cpu") == 0) {
        l->size = count_cpus();
    } else if (strcmp(value, "gpu") == 0) {
        l->size = count_gpus();
        if (l->size == 0) {
            return cli_usage_error("run", "-n is `gpu`, but no GPU was found (CUDA_VISIBLE_DEVICES, /proc/driver/nvidia/gpus)");
        }
    } else if (!whole_number(value, 1, RUN_MOST_RANKS, &l->size)) {
        return cli_usage_error("run", "-n is `%s`; 1 to %d ranks, `cpu`, `gpu` or `auto` were expected", value,
                               RUN_MOST_RANKS);
    }
    l->size = l->size < RUN_MOST_RANKS ? l->size : RUN_MOST_RANKS;
    return CLI_OK;
}

/* -- which ------------------------------------------------------------------------------------------------------- */
/* "3", or "0:1,2:3" by rank: the streams of that rank, RUN_OUT and RUN_ERR. -1: it says neither. */
int run_mask_of(const char *spec, int rank)
{
    int all = 0, found = 0;
    if (spec == NULL || whole_number(spec, 0, 3, &all)) {
        return all;
    }
    for (const char *p = spec;; p++) {
        char *end = NULL;
        long r = strtol(p, &end, 10);
        if (end == p || *end != ':' || r < 0 || r >= RUN_MOST_RANKS || end[1] < '0' || end[1] > '3' ||
            (end[2] != ',' && end[2] != '\0')) {
            return -1;
        }
        found = r == rank ? end[1] - '0' : found;
        p = end + 2;
        if (*p == '\0') {
            return found;
        }
    }
}

/* Whether a list as "0,2" has the rank; 1 for no list. -1: it is none. */
int run_list_has(const char *list, int rank)
{
    int found = 0;
    for (const char *p = list; p != NULL; p++) {
        char *end = NULL;
        long r = strtol(p, &end, 10);
        if (end == p || r < 0 || (*end != ',' && *end != '\0')) {
            return -1;
        }
        found = r == rank ? 1 : found;
        p = end;
        if (*p == '\0') {
            return found;
        }
    }
    return 1;
}

/* -- one option -------------------------------------------------------------------------------------------------- */
static int set_option(launch *l, const option_row *row, const char *value)
{
    const char **text = (const char **)(void *)((char *)l + row->offset);
    int n;
    switch (row->kind) {
    case OPT_RANKS: return set_ranks(l, value);
    case OPT_NODES:
        return strcmp(value, "1:1") == 0 || whole_number(value, 1, 1, &n)
                   ? CLI_OK
                   : cli_usage_error("run", "--nnodes is `%s`; muster run starts ranks of one machine only: for several "
                                            "there are mpirun and srun", value);
    case OPT_NODE_RANK:
        return whole_number(value, 0, 0, &n) ? CLI_OK : cli_usage_error("run", "--node-rank is `%s`, of one machine", value);
    case OPT_RESTARTS:
        return whole_number(value, 0, INT_MAX, &l->max_restarts)
                   ? CLI_OK
                   : cli_usage_error("run", "--max-restarts is `%s`; a whole number was expected", value);
    case OPT_TIMEOUT:
        return whole_number(value, 0, INT_MAX, &l->shutdown)
                   ? CLI_OK
                   : cli_usage_error("run", "--shutdown-timeout is `%s`; whole seconds were expected", value);
    case OPT_PORT:
        if (!whole_number(value, 1, 65535, &n)) {
            return cli_usage_error("run", "--master-port is `%s`; 1 to 65535 was expected", value);
        }
        break;
    case OPT_MASK:
        if (run_mask_of(value, 0) < 0) {
            return cli_usage_error("run", "%s is `%s`; 0 to 3, or ranks with such, as 0:3,1:2, were expected", row->name,
                                   value);
        }
        break;
    case OPT_FILTER:
        if (run_list_has(value, 0) < 0) {
            return cli_usage_error("run", "%s is `%s`; ranks with commas between were expected", row->name, value);
        }
        break;
    case OPT_TEXT: break;
    case OPT_SWITCH:
    case OPT_IGNORED: return CLI_OK;
    case OPT_REFUSED:
        return cli_usage_error("run", "%s is for Python; start its interpreter: -- python3 %s...", row->name,
                               row->letter == 'm' ? "-m " : "");
    }
    *text = value;
    return CLI_OK;
}

/* torchrun spells its options with underscores or hyphens. */
static bool is_option(const char *arg, size_t n, const char *name)
{
    for (size_t i = 0; i < n; i++) {
        if (name[i] == '\0' || (arg[i] != name[i] && !(arg[i] == '_' && name[i] == '-'))) {
            return false;
        }
    }
    return name[n] == '\0';
}

/* The row of an argument; *value points into the argument, or is NULL when it holds none. */
static const option_row *find(const char *arg, const char **value)
{
    const char *equals = strchr(arg, '=');
    size_t n = equals != NULL ? (size_t)(equals - arg) : strlen(arg);
    for (int i = 0; i < OPTIONS; i++) {
        if (is_option(arg, n, table[i].name)) {
            *value = equals != NULL ? equals + 1 : NULL;
            return &table[i];
        }
        if (table[i].letter != 0 && arg[1] == table[i].letter) {
            *value = arg[2] == '\0' ? NULL : arg[2] == '=' ? arg + 3 : arg + 2;
            return &table[i];
        }
    }
    return NULL;
}

int run_parse(launch *l, int argc, char **argv)
{
    int i = 1;
    for (; i < argc && argv[i][0] == '-'; i++) {
        const char *arg = argv[i], *value = NULL;
        if (strcmp(arg, "--") == 0) {
            i++;
            break;
        }
        if (strcmp(arg, "-h") == 0 || strcmp(arg, "--help") == 0) {
            fputs(help_text, stdout);
            return -1;
        }
        const option_row *row = find(arg, &value);
        if (row == NULL) {
            return cli_usage_error("run", "unknown option `%s`", arg);
        }
        bool wants = row->kind != OPT_SWITCH && row->kind != OPT_REFUSED;
        if (!wants && value != NULL) {
            return cli_usage_error("run", "%s takes no value", row->name);
        }
        value = value != NULL || !wants ? value : i + 1 < argc ? argv[++i] : NULL;
        if (wants && value == NULL) {
            return cli_usage_error("run", "%s needs a value", arg);
        }
        if (set_option(l, row, value) != CLI_OK) {
            return CLI_USAGE;
        }
    }
    l->program = argv + i;
    return i < argc ? CLI_OK : cli_usage_error("run", "no program to run");
}
