/* A driver for tests: keeps the state of each process in a file of $FAKE_CUDA, writes down every call, and fails or
   kills its caller when told so. Files: <pid> state; log; fail, kill: "<call> <n>" for the n-th such call. */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *folder(void) { const char *found = getenv("FAKE_CUDA"); return found ? found : "/nonexistent"; }

static int read_state(int pid) {
  char path[512], text[8] = "";
  snprintf(path, sizeof path, "%s/%d", folder(), pid);
  int file = open(path, O_RDONLY);
  if (file < 0) return -1;
  ssize_t got = read(file, text, sizeof text - 1);
  close(file);
  return got > 0 ? atoi(text) : -1;
}

static void write_state(int pid, int state) {
  char path[512], draft[520];
  snprintf(path, sizeof path, "%s/%d", folder(), pid);
  snprintf(draft, sizeof draft, "%s.new", path);
  FILE *file = fopen(draft, "w");
  fprintf(file, "%d", state);
  fclose(file);
  rename(draft, path);
}

static int counted(const char *call) {
  char path[512], line[128];
  int count = 0;
  snprintf(path, sizeof path, "%s/log", folder());
  FILE *file = fopen(path, "r");
  while (file && fgets(line, sizeof line, file)) count += !strncmp(line, call, strlen(call)) && line[strlen(call)] == ' ';
  if (file) fclose(file);
  return count;
}

static int is_meant(const char *what, const char *call) {
  char path[512], wanted[64] = "";
  int number = 0;
  snprintf(path, sizeof path, "%s/%s", folder(), what);
  FILE *file = fopen(path, "r");
  if (!file) return 0;
  int got = fscanf(file, "%63s %d", wanted, &number);
  fclose(file);
  return got == 2 && !strcmp(wanted, call) && (number == 0 || number == counted(call));
}

static int change(const char *call, int pid, int from, int to) {
  char path[512];
  snprintf(path, sizeof path, "%s/log", folder());
  FILE *log = fopen(path, "a");
  fprintf(log, "%s %d\n", call, pid);
  fclose(log);
  if (is_meant("kill-before", call)) raise(SIGKILL);
  if (is_meant("fail", call)) return 801;
  if (read_state(pid) != from) return 1;
  write_state(pid, to);
  if (is_meant("kill", call)) raise(SIGKILL);
  return 0;
}

int cuInit(unsigned flags) { return (int)flags; }
int cuDriverGetVersion(int *version) {
  char path[512];
  snprintf(path, sizeof path, "%s/old", folder());
  *version = access(path, F_OK) ? 13000 : 12040;
  return 0;
}
int cuGetErrorString(int code, const char **text) { *text = code == 801 ? "operation not supported" : "invalid"; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *handle, int number) { *handle = number; return 0; }
int cuDeviceGetName(char *name, int size, int handle) { snprintf(name, size, "Fake %d", handle); return 0; }
int cuDeviceGetUuid_v2(unsigned char *uuid, int handle) {
  char path[512];
  snprintf(path, sizeof path, "%s/other", folder());
  memset(uuid, access(path, F_OK) ? 0x11 : 0x22, 16);
  uuid[0] = (unsigned char)handle;
  return 0;
}
int cuCheckpointProcessGetState(int pid, int *state) {
  int found = read_state(pid);
  if (found < 0 || kill(pid, 0)) return 3;
  *state = found;
  return 0;
}
int cuCheckpointProcessLock(int pid, void *arguments) { (void)arguments; return change("lock", pid, 0, 1); }
int cuCheckpointProcessCheckpoint(int pid, void *arguments) { (void)arguments; return change("checkpoint", pid, 1, 2); }
int cuCheckpointProcessRestore(int pid, void *arguments) { return change(arguments ? "remap" : "restore", pid, 2, 1); }
int cuCheckpointProcessUnlock(int pid, void *arguments) { (void)arguments; return change("unlock", pid, 1, 0); }

/* For the job: begin to use the device; and work on it, which waits while the process is not running there. */
void fake_begin(void) { write_state(getpid(), 0); }
void fake_work(void) { while (read_state(getpid()) > 0) usleep(1000); }
