/* The smallest program: opens a context, joins the ranks it was started with, and says who is there. Try
 *     muster run -n 2 -- ./hello */
#include <muster/muster.h>

#include <stdio.h>

int main(void)
{
    mu_context *c = mu_context_open(NULL);
    printf("muster %s: %s\n", mu_version(), mu_status_name(mu_context_status(c)));
    return mu_context_close(c) == MU_OK ? 0 : 1;
}
