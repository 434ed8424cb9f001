"""The kernels of this package; every module here is imported by ``scan_all_kernels``."""
