# find_package(torchweld): the target torchweld::torchweld, for C++ programs without Python.
#
#   cmake -Dtorchweld_DIR="$(python -c 'import torchweld; print(torchweld.__path__[0])')/cmake" ...
#
# TORCH_ROOT, the folder of the installed torch, is by default the torch beside torchweld. If torch
# was built with CUDA, torch's own CMake package asks for a CUDA toolkit. Programs need no toolkit,
# so this file names torch's headers and libraries itself.
get_filename_component(_torchweld_root "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
if(NOT TORCH_ROOT)
  get_filename_component(TORCH_ROOT "${_torchweld_root}/../torch" ABSOLUTE)
endif()
set(_torchweld_library "${_torchweld_root}/_ops.abi3.so")
foreach(_torchweld_file "${TORCH_ROOT}/include/ATen/ATen.h" "${_torchweld_library}")
  if(NOT EXISTS "${_torchweld_file}")
    set(torchweld_FOUND FALSE)
    set(torchweld_NOT_FOUND_MESSAGE "${_torchweld_file} is not there; set TORCH_ROOT to the folder \
of the installed torch")
    return()
  endif()
endforeach()

set(_torchweld_c10_cuda "")
if(EXISTS "${TORCH_ROOT}/lib/libc10_cuda.so")
  set(_torchweld_c10_cuda "c10_cuda")
endif()

if(NOT TARGET torchweld::torchweld)
  add_library(torchweld::torchweld INTERFACE IMPORTED)
  set_target_properties(torchweld::torchweld PROPERTIES
    INTERFACE_COMPILE_FEATURES cxx_std_20
    INTERFACE_COMPILE_DEFINITIONS _GLIBCXX_USE_CXX11_ABI=1
    INTERFACE_INCLUDE_DIRECTORIES "${_torchweld_root}/include;${TORCH_ROOT}/include;\
${TORCH_ROOT}/include/torch/csrc/api/include"
    INTERFACE_LINK_DIRECTORIES "${TORCH_ROOT}/lib"
    INTERFACE_LINK_OPTIONS "-Wl,-rpath,${TORCH_ROOT}/lib;-Wl,--allow-shlib-undefined"
    # A program uses no symbol of the library, but calls its ops through torch's dispatcher. Hence
    # --no-as-needed. The library is the last, because c10_cuda knows the folder of CUDA's runtime,
    # which both need. It goes to the linker as a path, because CMake would search -l_ops.abi3.
    # libstdc++ must be the shared one, which torch's libraries also use. With a static one beside
    # it, a process ends in "free(): invalid pointer".
    INTERFACE_LINK_LIBRARIES "-Wl,--push-state,--no-as-needed;torch;torch_cpu;c10;\
${_torchweld_c10_cuda};-Wl,${_torchweld_library},--pop-state;-l:libstdc++.so.6")
endif()
