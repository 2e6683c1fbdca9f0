# One machine of a cluster: `docker build -t gpp .`, then `docker compose up` for two of them (compose.yaml).
FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /gpp
COPY . .
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu -c constraints.txt .
# Runs write beside the working directory, as a user without rights.
RUN useradd --create-home user
USER user
WORKDIR /home/user
ENTRYPOINT ["gpp"]
