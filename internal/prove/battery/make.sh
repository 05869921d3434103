need make gcc ar
for i in 1 2 3 4 5 6 7 8; do
	echo "int f$i(void) { return $i; }" >f$i.c
done
cat >main.c <<'C'
int f1(void), f2(void), f3(void), f4(void), f5(void), f6(void), f7(void), f8(void);
int main(void) { return f1() + f2() + f3() + f4() + f5() + f6() + f7() + f8() - 36; }
C
printf 'main: main.o lib.a\n\t$(CC) -o $@ $^\nlib.a: %s\n\tar rcs $@ $^\n' "$(echo f?.c | sed 's/\.c/.o/g')" >Makefile
make -j4 >/dev/null
./main
echo "8 objects by 4 jobs"
