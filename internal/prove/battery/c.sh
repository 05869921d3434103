need gcc
cat >main.c <<'C'
#include <math.h>
#include <pthread.h>
#include <stdio.h>
static void *half(void *p) { *(double *)p = sqrt(*(double *)p); return 0; }
int main(void) {
	double x = 1764;
	pthread_t t;
	if (pthread_create(&t, 0, half, &x) || pthread_join(t, 0)) return 1;
	printf("%.0f\n", x);
	return 0;
}
C
gcc -O2 -Wall -o main main.c -lm -lpthread
[ "$(./main)" = 42 ]
gcc --version | head -n 1
