/* The subcommands of `muster`, one file each. They are users of the library like any other: only <muster/...>. */
#ifndef MUSTER_CLI_COMMANDS_H
#define MUSTER_CLI_COMMANDS_H

/* Exit codes, as the man page has them; 128 + a signal's number where one ended it, also after `muster train` saved
 * its state at that signal. A program run by `muster run` passes its own code on. */
enum {
    CLI_OK = 0,
    CLI_FAILED = 1, /* it failed while running; muster diff: the files differ */
    CLI_USAGE = 2,  /* a bad flag, a missing file, shapes that cannot fit: nothing was done or written; muster diff: any
                       failure, as diff(1) has it */
    CLI_RUNS_CODE = 3 /* muster inspect --strict: the file would run code in Python */
};

/* Each gets its own argc and argv: argv[0] is the subcommand's name, options follow. Returns the exit code. */
int cmd_train(int argc, char **argv);
int cmd_eval(int argc, char **argv);
int cmd_run(int argc, char **argv);
int cmd_inspect(int argc, char **argv);
int cmd_convert(int argc, char **argv);
int cmd_diff(int argc, char **argv);
int cmd_verify(int argc, char **argv);
int cmd_names(int argc, char **argv);
int cmd_trace_merge(int argc, char **argv);
int cmd_bench(int argc, char **argv);
int cmd_plan(int argc, char **argv);
int cmd_version(int argc, char **argv);
int cmd_help(int argc, char **argv);

/* Prints "muster COMMAND: message" and "Try 'muster COMMAND --help'." to stderr; returns CLI_USAGE. */
int cli_usage_error(const char *command, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Prints "muster COMMAND: message" to stderr; returns code, for an expression. */
int cli_fail(const char *command, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

#endif
