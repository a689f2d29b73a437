/* Minimize a parabola. The output is never flushed: stdio does it at the end of a line, and only on a terminal. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

int main(int argc, char **argv) {
    double lr = 0.1, x = 2.0;
    int steps = 20;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--lr") == 0)
            lr = atof(argv[i + 1]);
        else if (strcmp(argv[i], "--steps") == 0)
            steps = atoi(argv[i + 1]);
    }
    for (int step = 0; step < steps; step++) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        printf("iter %d: loss = %f, clock = %.3f\n", step, x * x, now.tv_sec + now.tv_nsec / 1e9);
        x -= 2 * lr * x;
        usleep(150000);
    }
    return 0;
}
