// The first program of a Linux that runs under Bochs: runs the programs of the kernels with the real instructions of AMX,
// alone and then side by side, so that Linux saves and restores the tiles of each, and switches the machine off.

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

static int start(const char *program, const char *output) {
    const int child = fork();
    if (!child) {
        dup2(open(output, O_WRONLY | O_CREAT | O_TRUNC, 0600), 1);
        execl(program, program, (char *)0);
        _exit(127);
    }
    return child;
}

static int succeeds(int child) {
    int status;
    return waitpid(child, &status, 0) == child && status == 0;
}

static size_t contents(const char *path, char *buffer, size_t size) {
    const int file = open(path, O_RDONLY);
    size_t length = 0;
    for (ssize_t some; file >= 0 && (some = read(file, buffer + length, size - length)) > 0;) length += some;
    close(file);
    return length;
}

static void show(const char *name, const char *program, const char *output) {
    static char buffer[1 << 20];
    const int ran = succeeds(start(program, output));
    printf("begin %s\n%.*send %s %s\n", name, (int)contents(output, buffer, sizeof(buffer)), buffer, name,
           ran ? "succeeded" : "failed");
}

static int same(const char *path, const char *other) {
    static char buffers[2][1 << 20];
    const size_t length = contents(path, buffers[0], sizeof(buffers[0]));
    return length > 0 && length == contents(other, buffers[1], sizeof(buffers[1])) &&
           !memcmp(buffers[0], buffers[1], length);
}

int main(void) {
    mknod("/dev/ttyS0", S_IFCHR | 0600, makedev(4, 64));
    const int serial = open("/dev/ttyS0", O_RDWR);
    for (int stream = 0; stream < 3; stream++) dup2(serial, stream);
    setenv("OMP_NUM_THREADS", "2", 1);
    show("products", "/products", "/products.txt");
    show("forwards", "/forwards", "/forwards.txt");
    const int products = start("/products", "/products-2.txt"), forwards = start("/forwards", "/forwards-2.txt");
    const int ran = succeeds(products) & succeeds(forwards);
    const int equal = same("/products.txt", "/products-2.txt") && same("/forwards.txt", "/forwards-2.txt");
    printf("side by side %s\n", ran && equal ? "succeeded" : "failed");
    fflush(stdout);
    tcdrain(1);
    reboot(RB_POWER_OFF);
}
