/* The elements of one tensor in a file, wherever they are, so that they can be read in pieces. */
#ifndef MUI_FILE_ELEMENTS_H
#define MUI_FILE_ELEMENTS_H

#include "io/checkpoint_file.h"

/* A view without dimensions of one element, and those joined that follow each other in memory. */
typedef struct mui_view {
    int ndim;
    int64_t dim[MUI_MAX_FILE_DIMS], stride[MUI_MAX_FILE_DIMS];
} mui_view;

typedef struct mui_elements {
    const mui_file_tensor *tensor;
    const unsigned char *first; /* element; unaligned. Valid until the file is closed or, unless mapped, another source
                                   of it is opened */
    int64_t elements;
    mui_view view;
    bool swap;
    bool mapped;                /* in the file itself, not inflated */
    bool direct;                /* what begins at first are the elements, row-major, as mui_elements_read gives them */
} mui_elements;

/* Finds the data and verifies their checksum, once for each zip member. After that nothing about reading can fail; and
 * opening a mapped source again cannot either. */
mu_status mui_elements_open(mu_checkpoint_file *k, const char *name, const mui_file_tensor *t,
                          mui_elements *out) MU_MUST_USE;
/* Elements [from, from + n), row-major, in the file's type. */
void mui_elements_read(const mui_elements *s, int64_t from, int64_t n, void *out);

#endif
