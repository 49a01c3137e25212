# selfspec serve in a container; docs/serving.md says how to run it.
#   docker build -t selfspec . && docker run -p 8000:8000 -v selfspec:/data -e SELFSPEC_API_KEY selfspec --model Qwen/Qwen3-4B-Instruct-2507
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY src src
# PyTorch first, of its CPU index: the package index's own build brings CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python -m venv /opt/selfspec \
    && /opt/selfspec/bin/pip install --no-cache-dir torch --index-url "$TORCH_INDEX" \
    && /opt/selfspec/bin/pip install --no-cache-dir '.[serve]'

FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --create-home --home-dir /data selfspec
COPY --from=build /opt/selfspec /opt/selfspec
USER selfspec
WORKDIR /data
# Models, low-bit weights and the state of the method are kept in the volume.
VOLUME /data
ENV PATH=/opt/selfspec/bin:$PATH HF_HOME=/data/hub XDG_CACHE_HOME=/data/cache PYTHONUNBUFFERED=1
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["selfspec", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD ["--help"]
