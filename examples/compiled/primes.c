#include <stdio.h>
#include <stdlib.h>

/* Prints the primes up to a bound. */
int main(int count, char **words) {
    int bound = count > 1 ? atoi(words[1]) : 100;
    for (int n = 2; n <= bound; n++) {
        int divisor = 2;
        while (divisor * divisor <= n && n % divisor != 0) divisor++;
        if (divisor * divisor > n) printf("%d\n", n);
    }
    return 0;
}
