/* Runs optimiser updates for test_kern_update.py: reads a command, arguments and hex floats from stdin, writes the
 * weights after the last step.
 *   sgd n steps lr momentum dampening weight_decay nesterov
 *   adam n steps lr beta1 beta2 eps weight_decay decoupled
 * then n weights, then steps times n gradients. */
#include "kern/kern.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void read_floats(float *p, int n)
{
    for (int i = 0; i < n; i++) {
        if (scanf("%f", &p[i]) != 1) {
            fprintf(stderr, "update_tool: a number is missing\n");
            exit(2);
        }
    }
}

int main(void)
{
    char command[8];
    int n = 0, steps = 0, last = 0;
    double a[5] = {0};
    if (scanf("%7s %d %d", command, &n, &steps) != 3 || n <= 0 || n > 100000) {
        return 2;
    }
    int scalars = strcmp(command, "sgd") == 0 ? 4 : 5;
    for (int i = 0; i < scalars; i++) {
        if (scanf("%lf", &a[i]) != 1) {
            return 2;
        }
    }
    if (scanf("%d", &last) != 1) {
        return 2;
    }
    float *w = calloc((size_t)n * 4, sizeof(float));
    if (w == NULL) {
        return 2;
    }
    float *g = w + n, *m = w + 2 * n, *v = w + 3 * n;
    read_floats(w, n);
    for (int step = 1; step <= steps; step++) {
        read_floats(g, n);
        if (scalars == 4) {
            mui_sgd_args s = {a[0], a[1], a[2], a[3], last != 0, step == 1};
            mui_sgd_update(NULL, n, w, g, s.momentum != 0 ? m : NULL, &s);
        } else {
            mui_adam_args s = {a[0], a[1], a[2], a[3], a[4], last != 0, step};
            mui_adam_update(NULL, n, w, g, m, v, &s);
        }
    }
    for (int i = 0; i < n; i++) {
        printf("%a\n", (double)w[i]);
    }
    free(w);
    return 0;
}
