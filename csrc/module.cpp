// torchweld._C: introspection only. It includes the rooms' torch-free config headers, links no
// libtorch, and its absence never breaks an op.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "ops/softmax/softmax_config.h"

namespace py = pybind11;

namespace torchweld {
namespace {

py::dict tile_dict(const SoftmaxTile& tile, int elem_size, bool backward) {
  py::dict d;
  d["blocks_per_row"] = tile.cluster;
  d["threads"] = tile.threads;
  d["loads"] = tile.loads;
  d["access_bytes"] = tile.vector ? 16 : elem_size;
  d["capacity"] = tile.capacity(elem_size);
  d["suits"] = tile.suits(elem_size, backward);
  return d;
}

py::list softmax_tiles(int elem_size, bool backward) {
  py::list tiles;
  for (const SoftmaxTile& tile : kSoftmaxTiles) {
    tiles.append(tile_dict(tile, elem_size, backward));
  }
  return tiles;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "What torchweld's kernels would choose; see torchweld.explain.";
  m.attr("softmax_stream_threads") = kSoftmaxStreamThreads;
  m.def("softmax_tiles", &softmax_tiles, py::arg("elem_size"), py::arg("backward"),
        "The tiles of the row softmax kernels, in the order of preference.");
  m.def(
      "choose_softmax_tile",
      [](int64_t n, int elem_size, bool aligned, bool backward, bool tiled, bool clusters) {
        return choose_softmax_tile({n, elem_size, aligned, backward, tiled, clusters});
      },
      py::arg("n"), py::arg("elem_size"), py::arg("aligned"), py::arg("backward"), py::arg("tiled"),
      py::arg("clusters"), "Index into softmax_tiles, or -1 for the streaming kernel.");
}

}  // namespace torchweld
