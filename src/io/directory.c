/* A folder given where a file was meant: which file in it. */
#include "io/directory.h"
#include "base/text.h"

#include <dirent.h>
#include <string.h>
#include <sys/stat.h>

#define SHOWN 3

/* The names that come first in order: a folder's own order says nothing. */
typedef struct found {
    char names[SHOWN][256];
    size_t count;
} found;

static void add(found *f, const char *name)
{
    size_t at = f->count < SHOWN ? f->count : SHOWN, n = strlen(name);
    f->count++;
    while (at > 0 && strcmp(name, f->names[at - 1]) < 0) {
        at--;
    }
    if (at == SHOWN || n >= sizeof(f->names[0])) {
        return;
    }
    memmove(f->names[at + 1 < SHOWN ? at + 1 : at], f->names[at], (SHOWN - 1 - at) * sizeof(f->names[0]));
    memcpy(f->names[at], name, n + 1);
}

static bool ends_with_one_of(const char *name, const char *const *ends)
{
    size_t n = strlen(name);
    for (; *ends != NULL; ends++) {
        size_t m = strlen(*ends);
        if (n > m && strcmp(name + n - m, *ends) == 0) {
            return true;
        }
    }
    return false;
}

mu_status mui_refuse_directory(mu_context *c, const char *path)
{
    static const char *const indexes[] = {".safetensors.index.json", ".bin.index.json", NULL};
    static const char *const files[] = {".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".th", ".pth.tar", NULL};
    struct stat st;
    if (stat(path, &st) != 0 || !S_ISDIR(st.st_mode)) {
        return MU_OK;
    }
    found index = {.count = 0}, file = {.count = 0};
    DIR *d = opendir(path);
    for (struct dirent *e; d != NULL && (e = readdir(d)) != NULL;) {
        if (ends_with_one_of(e->d_name, indexes)) {
            add(&index, e->d_name);
        } else if (ends_with_one_of(e->d_name, files)) {
            add(&file, e->d_name);
        }
    }
    if (d != NULL) {
        closedir(d);
    }
    /* With an index, the files are its shards. */
    const found *f = index.count > 0 ? &index : &file;
    const char *slash = path[strlen(path) - 1] == '/' ? "" : "/";
    if (f->count == 1) {
        return mui_fail(c, MU_ERR_IO, "%s: is a directory, a file was expected: its checkpoint is %s%s%s", path, path,
                        slash, f->names[0]);
    }
    if (f->count == 0) {
        return mui_fail(c, MU_ERR_IO, "%s: is a directory, a file was expected; no checkpoint is known by its name in it",
                        path);
    }
    mui_text t;
    mui_text_init(&t, c);
    for (size_t i = 0; i < f->count && i < SHOWN; i++) {
        mui_text_add(&t, "%s%s", i > 0 ? ", " : "", f->names[i]);
    }
    mu_status s = mui_fail(c, MU_ERR_IO, "%s: is a directory, a file was expected; it has %zu checkpoints: %s%s", path,
                           f->count, mui_text_get(&t), f->count > SHOWN ? ", ..." : "");
    mui_text_free(&t);
    return s;
}
