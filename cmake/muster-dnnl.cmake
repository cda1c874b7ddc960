# Finds oneDNN and makes the target DNNL::dnnl; muster_dnnl_FOUND tells. By header and library, not by oneDNN's own
# package file: Debian's demands OpenCL's headers and library, which nothing here uses.
find_path(MUSTER_DNNL_INCLUDE_DIR dnnl.h)
find_library(MUSTER_DNNL_LIBRARY dnnl)
mark_as_advanced(MUSTER_DNNL_INCLUDE_DIR MUSTER_DNNL_LIBRARY)
set(muster_dnnl_FOUND FALSE)
if(MUSTER_DNNL_INCLUDE_DIR AND MUSTER_DNNL_LIBRARY)
  set(muster_dnnl_FOUND TRUE)
  if(NOT TARGET DNNL::dnnl)
    add_library(DNNL::dnnl UNKNOWN IMPORTED)
    set_target_properties(DNNL::dnnl PROPERTIES
      IMPORTED_LOCATION "${MUSTER_DNNL_LIBRARY}" INTERFACE_INCLUDE_DIRECTORIES "${MUSTER_DNNL_INCLUDE_DIR}")
  endif()
endif()
