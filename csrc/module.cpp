// torchweld._C: introspection only. It binds what tuning/ offers, links no libtorch, and its
// absence never breaks an op.
#include <pybind11/pybind11.h>

#include "tuning/introspection.h"
#include "tuning/plans.h"

namespace torchweld {

PYBIND11_MODULE(_C, m) {
  m.doc() = "What torchweld's kernels would choose; see torchweld.explain.";
  m.def("families", &families,
        "The kinds of kernels that tune knows, each with the names of its problem's numbers.");
  m.def("choose", &choose, py::arg("family"), py::arg("problem"),
        "The configuration that a problem takes by itself, as `candidate` tells it.");
  m.def("candidates", &candidates, py::arg("family"), py::arg("problem"),
        "Every configuration, with why the problem can't take it.");
  m.def("candidate", &candidate, py::arg("family"), py::arg("problem"), py::arg("choice"),
        "One configuration by its name.");
  m.def("shape_class", &shape_class, py::arg("family"), py::arg("problem"),
        "The problem that stands for all that share a remembered choice.");
  m.def("scalar_attention_sweeps", &scalar_attention_sweeps, py::arg("n"), py::arg("backward"),
        py::arg("sms"), "The sweeps of scalar_attention or its gradient over n x n pairs.");
  m.def(
      "matrix_pass_plan", &matrix_pass_plan, py::arg("rows"), py::arg("n"), py::arg("elem_size"),
      py::arg("reads"), py::arg("column_values"), py::arg("column_sums"), py::arg("shift"),
      py::arg("row_stride"), py::arg("sms"),
      "How a pass over a (rows, n) matrix is cut into blocks; `heads` are the elements before the "
      "first access of the first 64 rows.");
}

}  // namespace torchweld
