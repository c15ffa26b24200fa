// torchweld._C binds the introspection functions of tuning/. It links no libtorch, and no op needs
// torchweld._C.
#include <pybind11/pybind11.h>

#include "tuning/introspection.h"
#include "tuning/plans.h"

namespace torchweld {

PYBIND11_MODULE(_C, m) {
  m.doc() = "The configurations that torchweld's kernels choose; see torchweld.explain.";
  m.def("families", &families,
        "The kernel families that tune knows, each with the names of its problem's fields.");
  m.def("choose", &choose, py::arg("family"), py::arg("problem"),
        "The heuristic configuration of a problem, as `candidate` returns it.");
  m.def("candidates", &candidates, py::arg("family"), py::arg("problem"),
        "Every configuration, with the reason why the problem does not allow it.");
  m.def("candidate", &candidate, py::arg("family"), py::arg("problem"), py::arg("choice"),
        "One configuration by its name.");
  m.def("shape_class", &shape_class, py::arg("family"), py::arg("problem"),
        "The problem that stands for all that share a remembered choice.");
  m.def("scalar_attention_sweeps", &scalar_attention_sweeps, py::arg("n"), py::arg("backward"),
        py::arg("sms"), "The sweeps of scalar_attention or its gradient over n x n pairs.");
  m.def("matrix_pass_plan", &matrix_pass_plan, py::arg("rows"), py::arg("n"), py::arg("elem_size"),
        py::arg("reads"), py::arg("column_values"), py::arg("column_sums"), py::arg("shift"),
        py::arg("row_stride"), py::arg("sms"),
        "The grid of a pass over a (rows, n) matrix; `heads` are the elements before the first "
        "vector access of each of the first 64 rows.");
}

}  // namespace torchweld
