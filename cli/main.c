/* The command `muster`: picks the subcommand. Nothing here touches the library beyond its version, so `muster run`
 * can fork before any thread or compute library exists. */
#include "commands.h"

#include <muster/base.h>

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static const struct command {
    const char *name, *what;
    int (*run)(int argc, char **argv);
} commands[] = {
    {"train", "train a network, from nothing or from a checkpoint, on one rank or several", cmd_train},
    {"eval", "measure accuracy and loss of a checkpoint on the test data", cmd_eval},
    {"run", "start a program on several ranks of this machine", cmd_run},
    {"inspect", "show what is inside a checkpoint, running nothing of it", cmd_inspect},
    {"convert", "write a checkpoint's state dict in another format, type or with other names", cmd_convert},
    {"diff", "compare the tensors of two checkpoints", cmd_diff},
    {"verify", "read all of a checkpoint and say whether it is whole", cmd_verify},
    {"names", "tell which parameters the indices in PyTorch's DDP message mean", cmd_names},
    {"trace-merge", "put traces of several ranks together, and say what they show", cmd_trace_merge},
    {"bench", "measure training steps, reductions, loading, or this machine", cmd_bench},
    {"plan", "predict a step's time on many ranks from the report of a few", cmd_plan},
    {"version", "print the version", cmd_version},
    {"help", "print this, or the help of a subcommand", cmd_help},
};

static void say(const char *command, const char *format, va_list args)
{
    /* One write per message, so that lines of several ranks do not mix. */
    char text[2048];
    int n = snprintf(text, sizeof(text), "muster%s%s: ", command != NULL ? " " : "", command != NULL ? command : "");
    vsnprintf(text + n, sizeof(text) - (size_t)n, format, args);
    fprintf(stderr, "%s\n", text);
}

int cli_fail(const char *command, int code, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    say(command, format, args);
    va_end(args);
    return code;
}

int cli_usage_error(const char *command, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    say(command, format, args);
    va_end(args);
    fprintf(stderr, "Try 'muster%s%s --help'.\n", command != NULL ? " " : "", command != NULL ? command : "");
    return CLI_USAGE;
}

static const struct command *find(const char *name)
{
    for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) {
        if (strcmp(commands[i].name, name) == 0) {
            return &commands[i];
        }
    }
    return NULL;
}

static void print_usage(FILE *out)
{
    fprintf(out, "usage: muster COMMAND [OPTION...]\n\n");
    for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) {
        fprintf(out, "  %-11s %s\n", commands[i].name, commands[i].what);
    }
    fprintf(out, "\n'muster COMMAND --help' lists a command's options; 'man muster' has everything.\n"
                 "Exit codes: 0 done, 1 failed while running, 2 bad flags or input (nothing was done).\n");
}

int cmd_version(int argc, char **argv)
{
    (void)argv;
    if (argc > 1) {
        return cli_usage_error(NULL, "version takes no arguments");
    }
    printf("muster %s\n", mu_version());
    return CLI_OK;
}

int cmd_help(int argc, char **argv)
{
    if (argc < 2) {
        print_usage(stdout);
        return CLI_OK;
    }
    const struct command *c = find(argv[1]);
    if (c == NULL) {
        return cli_usage_error(NULL, "no command '%s'", argv[1]);
    }
    if (c->run == cmd_help || c->run == cmd_version) {
        print_usage(stdout);
        return CLI_OK;
    }
    char help[] = "--help";
    return c->run(2, (char *[]){argv[1], help, NULL});
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        print_usage(stderr);
        return CLI_USAGE;
    }
    const char *name = argv[1];
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0) {
        name = "help";
    } else if (strcmp(name, "--version") == 0) {
        name = "version";
    }
    const struct command *c = find(name);
    if (c == NULL) {
        return cli_usage_error(NULL, "no command '%s'", name);
    }
    return c->run(argc - 1, argv + 1);
}
