// Calls the functions of a library for another program: emulated.py compiles this for ARM and runs
// it in QEMU.
//
// In: the path of the library as the argument, and calls on stdin. Out: for each call, on stdout,
// the result and the contents of all buffers. A call is, in integers of 64 bits:
//     length of the name, number of buffers, of relocations, of integers and of floats;
//     the size of each buffer; the name; the buffers;
//     the relocations: a buffer and an offset at which it holds the address of another buffer and
//     offset;
//     the integers: a buffer and an offset, or -1 and a value; the floats, as doubles.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

namespace {

constexpr size_t MAX_INTEGERS = 32, MAX_FLOATS = 4;
typedef int64_t Integer;

void fail(const char* what) {
  fprintf(stderr, "%s\n", what);
  exit(1);
}

template <class T> std::vector<T> read(size_t count) {
  std::vector<T> values(count);
  if (count && fread(values.data(), sizeof(T), count, stdin) != count) fail("half a call");
  return values;
}

// Memory, which is aligned as a tensor's is.
struct Buffer {
  size_t size;
  char* data;
  explicit Buffer(size_t size) : size(size), data((char*)aligned_alloc(64, (size + 127) & -64)) {
    if (size && fread(data, 1, size, stdin) != size) fail("half a buffer");
  }
};

template <size_t> using IntegerOf = Integer;
template <size_t> using FloatOf = float;
// AAPCS64 passes integers and addresses in registers and then on the stack, apart from the floats,
// so one type of function does for all. Those that are too many are not read.
template <size_t... I, size_t... F>
Integer call(void* function, const Integer* integers, const float* floats,
             std::index_sequence<I...>, std::index_sequence<F...>) {
  return ((Integer (*)(IntegerOf<I>..., FloatOf<F>...))function)(integers[I]..., floats[F]...);
}

}  // namespace

int main(int, char** arguments) {
  void* library = dlopen(arguments[1], RTLD_NOW | RTLD_GLOBAL);
  if (!library) fail(dlerror());
  for (Integer sizes[5]; fread(sizes, sizeof sizes, 1, stdin);) {
    const auto [name_length, num_buffers, num_relocations, num_integers, num_floats] = sizes;
    const std::vector<Integer> buffer_sizes = read<Integer>(num_buffers);
    std::vector<char> name = read<char>(name_length);
    name.push_back(0);
    std::vector<Buffer> buffers;
    for (Integer size : buffer_sizes) buffers.emplace_back(size);
    for (Integer i = 0; i < num_relocations; i++) {
      const std::vector<Integer> from = read<Integer>(4);
      const char* address = buffers[from[2]].data + from[3];
      memcpy(buffers[from[0]].data + from[1], &address, sizeof address);
    }
    if (num_integers > (Integer)MAX_INTEGERS || num_floats > (Integer)MAX_FLOATS)
      fail("too many arguments");
    Integer integers[MAX_INTEGERS] = {};
    for (Integer i = 0; i < num_integers; i++) {
      const std::vector<Integer> value = read<Integer>(2);
      integers[i] = value[0] < 0 ? value[1] : (Integer)(buffers[value[0]].data + value[1]);
    }
    float floats[MAX_FLOATS] = {};
    for (Integer i = 0; i < num_floats; i++) floats[i] = (float)read<double>(1)[0];
    void* function = dlsym(library, name.data());
    if (!function) fail(dlerror());
    const Integer result =
        call(function, integers, floats, std::make_index_sequence<MAX_INTEGERS>(),
             std::make_index_sequence<MAX_FLOATS>());
    fwrite(&result, sizeof result, 1, stdout);
    for (const Buffer& buffer : buffers) {
      fwrite(buffer.data, 1, buffer.size, stdout);
      free(buffer.data);
    }
    fflush(stdout);
  }
}
