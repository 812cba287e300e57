// For all native code here, see native.py.

#pragma once

#include <ATen/cpu/vec/vec.h>
#include <cstddef>
#include <cstdio>
#include <exception>

// Returns 0, or 1 and a message: no exception may reach the caller, which is Python's ctypes.
template <typename F>
int guarded(char* message, size_t size, F func) {
  try {
    func();
    return 0;
  } catch (const std::exception& error) {
    std::snprintf(message, size, "%s", error.what());
    return 1;
  }
}

// e^x for x <= 0, NaN for NaN; within 1e-7 of its value down to e^-86, below that 0. It is inlined, unlike that of Vec.
// Reduction by Cody and Waite, x = n·ln(2) + r, and the polynomial of the Cephes library (expf.c).
inline at::vec::Vectorized<float> exp_nonpositive(const at::vec::Vectorized<float>& x) {
  using Vec = at::vec::Vectorized<float>;
  using Int = at::vec::Vectorized<int32_t>;
  const Vec lowest(-86.f), clamped = at::vec::maximum(x, lowest);
  const Vec magic(12582912.f);  // 1.5·2^23: after adding it, n is in the lowest bits
  const Vec shifted = at::vec::fmadd(clamped, Vec(1.44269504f), magic), n = shifted - magic;
  const Vec r = at::vec::fmadd(n, Vec(2.12194440e-4f), at::vec::fmadd(n, Vec(-0.693359375f), clamped));
  Vec sum(1.9875691500e-4f);
  for (const float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    sum = at::vec::fmadd(sum, r, Vec(factor));
  sum = at::vec::fmadd(sum, r * r, r) + Vec(1.f);
  const Int power = (Int::loadu(&shifted) << Int(23)) + Int(127 << 23);  // the bits of 2^n
  return Vec::blendv(sum * Vec::loadu(&power), Vec(0.f), x < lowest);
}
