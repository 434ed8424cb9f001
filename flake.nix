{
  description = "layout-kernels: RMSNorm and gated-MLP layers for CUDA, Ascend NPU and CPU";

  inputs.kernel-builder.url = "github:huggingface/kernels";

  outputs =
    { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
    };
}
