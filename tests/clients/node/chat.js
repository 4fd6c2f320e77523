// Streams one chat and prints each message as a line of JSON; an error is the last line.
// Usage: node chat.js HOST:PORT PROTO_DIR REQUEST_JSON
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");

const [target, protoDir, request] = process.argv.slice(2);
const definition = protoLoader.loadSync("pagewire/v1/inference.proto", {
  includeDirs: [protoDir],
  enums: String,
  oneofs: true,
});
const { Inference } = grpc.loadPackageDefinition(definition).pagewire.v1;
const client = new Inference(target, grpc.credentials.createInsecure());

const call = client.Chat(JSON.parse(request));
call.on("data", (message) => console.log(JSON.stringify(message)));
call.on("error", (error) => {
  console.log(JSON.stringify({ code: grpc.status[error.code], details: error.details }));
  client.close();
});
call.on("end", () => client.close());
