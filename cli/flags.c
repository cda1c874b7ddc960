/* The flag table's parser. */
#include "flags.h"
#include "commands.h"

#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define FLAG_MAX 64

static int count_flags(const flag *table)
{
    int n = 0;
    while (table[n].kind != FLAG_END) {
        n++;
    }
    return n;
}

static void print_help(const char *command, const char *about, const flag *table)
{
    printf("usage: muster %s", command);
    for (const flag *f = table; f->kind != FLAG_END; f++) {
        if (f->kind == FLAG_FILE) {
            printf(" %s", f->name);
        } else if (f->kind == FLAG_WORDS) {
            printf(" %s...", f->name);
        }
    }
    printf(" [OPTION...]\n%s\n\n", about);
    for (const flag *f = table; f->kind != FLAG_END; f++) {
        if (f->kind == FLAG_FILE || f->kind == FLAG_WORDS) {
            continue;
        }
        char left[64];
        snprintf(left, sizeof(left), "--%s%s%s", f->name, f->arg != NULL ? " " : "",
                 f->kind == FLAG_CHOICE ? "NAME" : f->arg != NULL ? f->arg : "");
        printf("  %-22s %s", left, f->help);
        if (f->kind == FLAG_CHOICE) {
            printf(" (%s)", f->arg);
        }
        printf("\n");
    }
    printf("  %-22s %s\n", "--help", "print this");
    if (strstr(about, "Exit codes:") != NULL) {
        return;
    }
    printf("\nExit codes: 0 done, 1 failed while running, 2 bad flags or input (nothing was done).\n");
}

static bool is_choice(const char *choices, const char *text)
{
    size_t length = strlen(text);
    for (const char *p = choices; length > 0 && p != NULL; p = strchr(p, '|')) {
        p += *p == '|';
        if (strncmp(p, text, length) == 0 && (p[length] == '|' || p[length] == '\0')) {
            return true;
        }
    }
    return false;
}

static int set_number(const char *command, const flag *f, void *field, const char *text)
{
    char *end = NULL;
    double value;
    errno = 0;
    if (f->kind == FLAG_INT) {
        long long n = strtoll(text, &end, 10);
        value = (double)n;
        if (end != text && *end == '\0' && errno == 0 && value >= f->min && value <= f->max) {
            *(int64_t *)field = n;
            return -1;
        }
    } else {
        value = strtod(text, &end);
        if (end != text && *end == '\0' && isfinite(value) && value >= f->min && value <= f->max) {
            *(double *)field = value;
            return -1;
        }
    }
    const char *what = f->kind == FLAG_INT ? "a whole number" : "a number";
    if (f->max < 1e15) {
        return cli_usage_error(command, "--%s needs %s from %g to %g, not '%s'", f->name, what, f->min, f->max, text);
    }
    return cli_usage_error(command, "--%s needs %s of at least %g, not '%s'", f->name, what, f->min, text);
}

static int set(const char *command, const flag *f, void *out, const char *text)
{
    void *field = (char *)out + f->offset;
    switch (f->kind) {
    case FLAG_SWITCH: *(bool *)field = true; return -1;
    case FLAG_INT:
    case FLAG_FLOAT: return set_number(command, f, field, text);
    case FLAG_CHOICE:
        if (!is_choice(f->arg, text)) {
            return cli_usage_error(command, "--%s is one of %s, not '%s'", f->name, f->arg, text);
        }
        *(const char **)field = text;
        return -1;
    case FLAG_TEXT:
        if ((text[0] == '\0' && f->min >= 0) || strchr(text, '\n') != NULL) {
            return cli_usage_error(command, "--%s needs a text of one line", f->name);
        }
        *(const char **)field = text;
        return -1;
    case FLAG_LIST: {
        flag_list *list = field;
        if (list->count == FLAG_LIST_MAX) {
            return cli_usage_error(command, "--%s was given more than %d times", f->name, FLAG_LIST_MAX);
        }
        list->item[list->count++] = text;
        return -1;
    }
    case FLAG_FILE: *(const char **)field = text; return -1;
    case FLAG_WORDS:
    case FLAG_END: break;
    }
    return cli_fail(command, CLI_FAILED, "a broken flag table");
}

/* The words that are left, which getopt moved to the end. */
static int set_files(const char *command, const flag *table, void *out, int argc, char **argv)
{
    for (const flag *f = table; f->kind != FLAG_END; f++) {
        if (f->kind != FLAG_FILE && f->kind != FLAG_WORDS) {
            continue;
        }
        if (optind == argc) {
            return cli_usage_error(command, "which %s?", f->name);
        }
        if (argv[optind][0] == '\0') {
            return cli_usage_error(command, "%s is an empty text", f->name);
        }
        if (f->kind == FLAG_WORDS) {
            *(flag_words *)(void *)((char *)out + f->offset) = (flag_words){argv + optind, argc - optind};
            return -1;
        }
        set(command, f, out, argv[optind++]);
    }
    if (optind < argc) {
        return cli_usage_error(command, "'%s' is one word too many", argv[optind]);
    }
    return -1;
}

int flags_parse(const char *command, const char *about, const flag *table, void *out, int argc, char **argv)
{
    int n = count_flags(table), output = -1;
    struct option longs[FLAG_MAX + 2];
    if (n > FLAG_MAX) {
        return cli_fail(command, CLI_FAILED, "a broken flag table");
    }
    memset(longs, 0, sizeof(longs));
    for (int i = 0; i < n; i++) {
        longs[i].name = table[i].kind == FLAG_FILE || table[i].kind == FLAG_WORDS ? "" : table[i].name; /* getopt matches no word with it */
        longs[i].has_arg = table[i].kind == FLAG_SWITCH ? no_argument : required_argument;
        longs[i].val = 256 + i;
        output = strcmp(longs[i].name, "output") == 0 ? i : output;
    }
    longs[n].name = "help";
    longs[n].val = 'h';
    opterr = 0;
    optind = 1;
    int found;
    while ((found = getopt_long(argc, argv, output >= 0 ? ":ho:" : ":h", longs, NULL)) != -1) {
        if (found == 'h') {
            print_help(command, about, table);
            return CLI_OK;
        }
        if (found == ':') {
            return cli_usage_error(command, "%s needs an argument", argv[optind - 1]);
        }
        if (found == '?') {
            const char *word = argv[optind - 1];
            if (optopt >= 256 && optopt < 256 + n) {
                return cli_usage_error(command, "--%s takes no argument", table[optopt - 256].name);
            }
            return cli_usage_error(command, "unknown or ambiguous option '%s'", word);
        }
        int code = set(command, &table[found == 'o' ? output : found - 256], out, optarg);
        if (code >= 0) {
            return code;
        }
    }
    return set_files(command, table, out, argc, argv);
}

void flags_value(const flag *f, const void *options, char *text, size_t size)
{
    const void *field = (const char *)options + f->offset;
    text[0] = '\0';
    switch (f->kind) {
    case FLAG_SWITCH: snprintf(text, size, "%s", *(const bool *)field ? "yes" : "no"); break;
    case FLAG_INT: snprintf(text, size, "%lld", (long long)*(const int64_t *)field); break;
    case FLAG_FLOAT: snprintf(text, size, "%.17g", *(const double *)field); break;
    case FLAG_TEXT:
    case FLAG_FILE:
    case FLAG_CHOICE: {
        const char *value = *(const char *const *)field;
        snprintf(text, size, "%s", value != NULL ? value : "");
        break;
    }
    case FLAG_LIST: {
        const flag_list *list = field;
        size_t used = 0;
        for (int i = 0; i < list->count && used < size; i++) {
            used += (size_t)snprintf(text + used, size - used, "%s%s", i > 0 ? " " : "", list->item[i]);
        }
        break;
    }
    case FLAG_WORDS:
    case FLAG_END: break;
    }
}

char *flags_note(const flag *table, const void *options)
{
    char *note = NULL, value[4096];
    size_t size = 0;
    FILE *out = open_memstream(&note, &size);
    if (out == NULL) {
        return NULL;
    }
    for (const flag *f = table; f->kind != FLAG_END; f++) {
        if (f->resume != FLAG_FREE) {
            flags_value(f, options, value, sizeof(value));
            fprintf(out, "%s=%s\n", f->name, value);
        }
    }
    if (fclose(out) != 0) {
        free(note);
        return NULL;
    }
    return note;
}

bool flags_noted(const char *note, const char *name, char *value, size_t size)
{
    size_t length = strlen(name);
    for (const char *line = note; line != NULL && *line != '\0';) {
        const char *end = strchr(line, '\n');
        size_t n = end != NULL ? (size_t)(end - line) : strlen(line);
        if (n > length && strncmp(line, name, length) == 0 && line[length] == '=') {
            snprintf(value, size, "%.*s", (int)(n - length - 1), line + length + 1);
            return true;
        }
        line = end != NULL ? end + 1 : NULL;
    }
    return false;
}

const flag *flags_differ(const flag *table, const void *options, const char *note, FILE *out, char *old, size_t size)
{
    char now[4096], before[4096];
    for (const flag *f = table; f->kind != FLAG_END; f++) {
        /* A flag that the other run's version did not know yet cannot differ. */
        if (f->resume == FLAG_FREE || f->resume == FLAG_ASKED || !flags_noted(note, f->name, before, sizeof(before))) {
            continue;
        }
        flags_value(f, options, now, sizeof(now));
        if (strcmp(now, before) == 0) {
            continue;
        }
        if (f->resume == FLAG_SAME) {
            snprintf(old, size, "%s", before);
            return f;
        }
        fprintf(out, "going on with --%s %s (was %s)\n", f->name, now, before);
    }
    return NULL;
}
