# Everyday commands. `make serve` and `make test` work on a fresh machine with Python 3.11 or newer.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PROTOS := $(wildcard protos/pagewire/v1/*.proto)

.PHONY: protos
protos: $(VENV)/.installed ## Regenerate the Python code beside the .proto files.
	cd protos && ../$(BIN)/python -m grpc_tools.protoc -I. -I$$(../$(BIN)/python -c 'import grpc_tools,os;print(os.path.join(os.path.dirname(grpc_tools.__file__),"_proto"))') \
	  --python_out=. --pyi_out=. --grpc_python_out=. pagewire/v1/*.proto
