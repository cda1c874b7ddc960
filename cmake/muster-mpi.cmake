# A plug-in for each MPI that pkg-config finds. Neither library nor command links to any MPI: they load the plug-in that
# fits the process, so one build serves machines with either and with none. MUSTER_MPIS lists the ones that were built.
set(MUSTER_PLUGIN_DIR ${PROJECT_BINARY_DIR}/muster-plugins) # beside the library, where it looks
set(MUSTER_MPIS "")

# key: in the file name and in MUSTER_MPI; module: of pkg-config; name: in messages, and what MPI_Get_library_version
# has for this MPI only.
function(muster_mpi_plugin key module name)
  pkg_check_modules(MPI_${key} QUIET IMPORTED_TARGET ${module})
  if(NOT TARGET PkgConfig::MPI_${key})
    message(STATUS "${name} was not found (pkg-config ${module}): no plug-in for it")
    return()
  endif()
  add_library(muster_mpi_${key} MODULE src/comm/mpi_plugin.c)
  target_include_directories(muster_mpi_${key} PRIVATE src)
  target_compile_definitions(muster_mpi_${key} PRIVATE MUI_MPI_NAME="${name}")
  target_link_libraries(muster_mpi_${key} PRIVATE muster_flags PkgConfig::MPI_${key})
  set_target_properties(muster_mpi_${key} PROPERTIES OUTPUT_NAME muster-mpi-${key}
    LIBRARY_OUTPUT_DIRECTORY ${MUSTER_PLUGIN_DIR})
  install(TARGETS muster_mpi_${key} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}/muster-plugins)
  set(MUSTER_MPIS ${MUSTER_MPIS} ${key} PARENT_SCOPE)
endfunction()

muster_mpi_plugin(openmpi ompi-c "Open MPI")
muster_mpi_plugin(mpich mpich "MPICH")
