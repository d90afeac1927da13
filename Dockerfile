# hybrid3d on NVIDIA GPUs. This image has not been built yet: see docs/status.md.
#
# NVIDIA's PyTorch image has its own PyTorch, which no released vLLM is compiled for. Therefore the image only provides
# the layers below Python (CUDA's compiler, cuDNN's headers, RDMA and UCX), and the Python packages are installed into a
# separate environment, with the versions of requirements/gpu.txt. 25.11 is the newest image with CUDA 13.0: torch's wheels
# are built with 13.0 (later images have 13.1 to 13.4), and Apex refuses to compile with another CUDA version than
# torch.
FROM nvcr.io/nvidia/pytorch:25.11-py3

# tests/house/test_dockerfile.py compares these with requirements/gpu.txt, by which everything else is installed.
ARG TORCH_VERSION=2.13.0
ARG TE_VERSION=2.20.2
# Apex is not on PyPI. Others have compiled this commit with CUDA 13 and torch 2.12 and 2.13.
ARG APEX_COMMIT=becbb77cea4cb54f2929f7c938a0a6f7dd1fdc39
# A100; H100 and H200; B200. Not called TORCH_CUDA_ARCH_LIST, because the image sets that variable, which would win.
ARG CUDA_ARCHS="8.0;9.0;10.0"
ARG MAX_JOBS=8

# The image pins its own Python packages for pip and puts its own PyTorch on the library path; disable both for the
# environment. CUDA_HOME says whose nvcc compiles: a dependency of vLLM (humming-kernels) brings one of CUDA 13.5.
ENV PIP_CONSTRAINT="" \
    PIP_NO_CACHE_DIR=1 \
    CUDA_HOME=/usr/local/cuda \
    LD_LIBRARY_PATH=/usr/local/cuda/compat/lib:/usr/local/nvidia/lib:/usr/local/nvidia/lib64 \
    VIRTUAL_ENV=/opt/hybrid3d \
    PATH=/opt/hybrid3d/bin:$PATH
RUN python3 -m venv --without-pip $VIRTUAL_ENV \
    && pip --python $VIRTUAL_ENV/bin/python install pip

# Ordered from what changes least to what changes most: torch, packages compiled against it, downloaded packages, this
# package. wheel is pinned, because a later version may lack the module that Transformer Engine builds with.
RUN pip install "setuptools>=78.1.1,<81" wheel==0.48.0 packaging ninja pybind11 torch==$TORCH_VERSION

# Compiled here, because in this image Transformer Engine would otherwise look for a wheel for the image's own PyTorch.
# Its setup.py imports torch, which is therefore installed above and not isolated from the build. NCCL's own kernels for
# expert parallelism, which Megatron does not call, would need the headers of the NCCL that torch was built with.
RUN NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_WITH_NCCL_EP=0 \
    pip install --no-build-isolation "transformer-engine[core_cu13,pytorch]==$TE_VERSION"

# Accumulates gradients of the output layer in place (fused_weight_gradient_mlp_cuda); fused Adam where TE has none.
RUN TORCH_CUDA_ARCH_LIST="$CUDA_ARCHS" pip install --no-build-isolation --no-deps \
    --config-settings="--build-option=--cpp_ext" --config-settings="--build-option=--cuda_ext" \
    git+https://github.com/NVIDIA/apex.git@$APEX_COMMIT

WORKDIR /home/hybrid3d
COPY pyproject.toml requirements/gpu.txt ./
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
        print(*p['dependencies'], *p['optional-dependencies']['gpu'], sep='\n')" > asked.txt \
    && pip install -r asked.txt -c gpu.txt && rm asked.txt gpu.txt

# torch 2.13.0 pins cuDNN 9.20.0.48, whose libcudnn_graph loads libcudnn_engines_tensor_ir, which its wheel lacks. The
# loader then finds the image's, of another version: CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH (pytorch#188892). After
# everything that has dependencies, and without its own, because pip would otherwise install torch's version again.
# Transformer Engine searches CUDNN_HOME before the image's libraries, and Python's packages last.
ENV CUDNN_HOME=$VIRTUAL_ENV/lib/python3.12/site-packages/nvidia/cudnn
RUN pip install --no-deps "nvidia-cudnn-cu13>=9.21" \
    && test -e $CUDNN_HOME/lib/libcudnn_engines_tensor_ir.so.9

COPY setup.py README.md LICENSE ./
COPY src src
RUN pip install --no-deps --no-build-isolation .
COPY recipes recipes
COPY examples examples

# Do not run as root. Files that a run writes belong to this user id: use --build-arg USER_ID=$(id -u) for your own.
ARG USER_ID=1000
RUN useradd --non-unique --uid $USER_ID --home-dir /home/hybrid3d hybrid3d \
    && mkdir runs && chown $USER_ID /home/hybrid3d runs
USER hybrid3d

# Checks that the engines can be imported and that a GPU is visible. Counting GPUs does not use GPU memory.
HEALTHCHECK --interval=5m --timeout=2m --start-period=2m --retries=2 \
    CMD python -c "import torch, megatron.core, transformer_engine.pytorch, vllm; \
        assert torch.cuda.device_count() > 0, 'no GPU: run with --gpus all'"

CMD ["hybrid3d", "--help"]
