/* Which MPI, and where its plug-in is. One binary serves machines without MPI and both MPIs: nothing here or above links
 * to any of them. */
#define _GNU_SOURCE /* dladdr, RTLD_DEFAULT */
#include "comm/mpi_load.h"
#include "base/alloc.h"
#include "comm/group.h"
#include "comm/naming.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#ifndef MUI_LIBDIR
#error "the build tells where libraries are installed"
#endif

typedef struct flavour {
    const char *key;         /* of MUSTER_MPI, and in the plug-in's file name */
    const char *name;        /* in messages, and what MPI_Get_library_version has for this MPI only */
    const char *launcher[4]; /* variables of its own launcher */
} flavour;

/* In the order in which they are tried when nothing tells. */
static const flavour flavours[] = {
    {"openmpi", "Open MPI", {"OMPI_COMM_WORLD_SIZE", "OMPI_UNIVERSE_SIZE", "PMIX_NAMESPACE", NULL}},
    {"mpich", "MPICH", {"PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", NULL}},
    {"smpi", "SMPI", {NULL}}, /* SimGrid's, see bench/scale.py: only of programs that have it loaded */
};
enum { FLAVOURS = sizeof(flavours) / sizeof(*flavours), REAL_FLAVOURS = FLAVOURS - 1 };

/* -- which --------------------------------------------------------------------------------------------------------- */
/* What the process has: FLAVOURS when it has none, -1 with an error raised when it is one that Muster does not know. */
static int loaded_flavour(mu_context *c)
{
    int (*get_version)(char *, int *) = NULL;
    /* POSIX's way to turn what dlsym gives into a function. */
    *(void **)(void *)&get_version = dlsym(RTLD_DEFAULT, "MPI_Get_library_version");
    if (get_version == NULL) {
        return FLAVOURS;
    }
    char version[8193] = ""; /* MPICH's and Open MPI's limits are 8192 and 256 */
    int n = 0;
    get_version(version, &n);
    for (int i = 0; i < FLAVOURS; i++) {
        if (strstr(version, flavours[i].name) != NULL) {
            return i;
        }
    }
    version[strcspn(version, "\n")] = '\0';
    mui_fail(c, MU_ERR_UNSUPPORTED, "this program has the MPI `%.100s`; Muster knows Open MPI and MPICH", version);
    return -1;
}

static int launched_flavour(void)
{
    for (int i = 0; i < FLAVOURS; i++) {
        for (const char *const *v = flavours[i].launcher; *v != NULL; v++) {
            if (mui_environment(*v) != NULL) {
                return i;
            }
        }
    }
    return FLAVOURS;
}

/* FLAVOURS: any. -1: an error was raised. */
static int choose(mu_context *c, bool lent)
{
    const char *asked = mui_environment("MUSTER_MPI");
    int wanted = FLAVOURS, loaded = loaded_flavour(c);
    for (int i = 0; i < REAL_FLAVOURS && asked != NULL; i++) {
        wanted = strcmp(asked, flavours[i].key) == 0 ? i : wanted;
    }
    if (loaded < 0) {
        return -1;
    }
    if (asked != NULL && wanted == FLAVOURS) {
        mui_fail(c, MU_ERR_ARG, "MUSTER_MPI is `%s`; openmpi or mpich was expected", asked);
        return -1;
    }
    if (lent && loaded == FLAVOURS) {
        mui_fail(c, MU_ERR_UNSUPPORTED, "a group was to be made from a communicator, but this program has no MPI library "
                                        "loaded (a static one cannot be found)");
        return -1;
    }
    if (loaded < FLAVOURS && wanted < FLAVOURS && wanted != loaded) {
        mui_fail(c, MU_ERR_ARG, "MUSTER_MPI is `%s`, but this program has %s loaded", asked, flavours[loaded].name);
        return -1;
    }
    return loaded < FLAVOURS ? loaded : wanted < FLAVOURS ? wanted : launched_flavour();
}

/* -- where --------------------------------------------------------------------------------------------------------- */
enum { PLACES = 5 };

/* The folder of a file, with a folder below it; false when the name has none. */
static bool beside(const char *file, const char *below, char out[PATH_MAX])
{
    const char *slash = strrchr(file, '/');
    return slash != NULL && snprintf(out, PATH_MAX, "%.*s/%s", (int)(slash - file), file, below) < PATH_MAX;
}

/* Where plug-ins may be, best first. */
static int list_places(char place[PLACES][PATH_MAX])
{
    static const char anchor = 0; /* lies in the library, or in the program when that has the library inside */
    int n = 0;
    const char *asked = mui_environment("MUSTER_PLUGINS");
    if (asked != NULL) {
        n += snprintf(place[n], PATH_MAX, "%s", asked) < PATH_MAX;
    }
    Dl_info info = {0};
    if (dladdr(&anchor, &info) != 0 && info.dli_fname != NULL) {
        n += beside(info.dli_fname, "muster-plugins", place[n]);
    }
    char self[PATH_MAX];
    ssize_t length = readlink("/proc/self/exe", self, sizeof(self) - 1);
    if (length > 0) {
        self[length] = '\0';
        n += beside(self, "muster-plugins", place[n]);
        n += beside(self, "../" MUI_LIBDIR_NAME "/muster-plugins", place[n]); /* bin/muster of an installed tree */
    }
    n += snprintf(place[n], PATH_MAX, "%s/muster-plugins", MUI_LIBDIR) < PATH_MAX;
    return n;
}

static const mui_mpi_table *load_file(mu_context *c, const char *file, bool *found)
{
    *found = access(file, F_OK) == 0;
    if (!*found) {
        return NULL;
    }
    /* Global, since Open MPI's own plug-ins look for its symbols there. */
    void *handle = dlopen(file, RTLD_NOW | RTLD_GLOBAL);
    if (handle == NULL) {
        const char *why = dlerror();
        mui_fail(c, MU_ERR_UNSUPPORTED, "cannot load the plug-in %s: %s", file, why != NULL ? why : "no reason given");
        return NULL;
    }
    mui_mpi_table_fn get = NULL;
    *(void **)(void *)&get = dlsym(handle, MUI_MPI_TABLE_SYMBOL);
    const mui_mpi_table *table = get != NULL ? get() : NULL;
    if (table == NULL || table->version != MUI_MPI_TABLE_VERSION || table->bytes != sizeof(*table)) {
        mui_fail(c, MU_ERR_UNSUPPORTED, "the plug-in %s was made for another version of Muster", file);
        return NULL; /* it stays loaded: MPI does not bear being unloaded */
    }
    return table;
}

/* NULL with *found when the error is raised. */
static const mui_mpi_table *load_flavour(mu_context *c, const flavour *f, bool *found)
{
    char place[PLACES][PATH_MAX];
    const mui_mpi_table *table = NULL;
    int n = list_places(place);
    for (int i = 0; i < n && !*found; i++) {
        char *file = mui_format(c, "%s/libmuster-mpi-%s.so", place[i], f->key);
        *found = file == NULL; /* the error is raised */
        table = file != NULL ? load_file(c, file, found) : NULL;
        mui_free(c, file);
    }
    return table;
}

const mui_mpi_table *mui_mpi_load(mu_context *c, bool lent)
{
    int chosen = choose(c, lent);
    if (chosen < 0) {
        return NULL;
    }
    int first = chosen < FLAVOURS ? chosen : 0, last = chosen < FLAVOURS ? chosen : REAL_FLAVOURS - 1;
    for (int i = first; i <= last; i++) {
        bool found = false;
        const mui_mpi_table *table = load_flavour(c, &flavours[i], &found);
        if (found) {
            return table;
        }
    }
    char place[PLACES][PATH_MAX], all[1200] = "";
    size_t used = 0;
    for (int i = 0, n = list_places(place); i < n; i++) {
        mui_join(all, sizeof(all), &used, ", ", place[i]);
    }
    mui_fail(c, MU_ERR_UNSUPPORTED, "no plug-in for %s (libmuster-mpi-%s.so) in %s",
             chosen < FLAVOURS ? flavours[chosen].name : "any MPI", chosen < FLAVOURS ? flavours[chosen].key : "*", all);
    return NULL;
}
