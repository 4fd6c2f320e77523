// Streams one chat over gRPC and prints the answer as it comes; an error ends it with status 1.
// Usage: chat HOST:PORT QUESTION [API_KEY]
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <iostream>
#include <memory>

#include "pagewire/v1/inference.grpc.pb.h"

int main(int argc, char** argv) {
  if (argc < 3) {
    std::cerr << "usage: " << argv[0] << " HOST:PORT QUESTION [API_KEY]\n";
    return 2;
  }
  auto stub = pagewire::v1::Inference::NewStub(
      grpc::CreateChannel(argv[1], grpc::InsecureChannelCredentials()));

  pagewire::v1::ChatRequest request;
  auto* message = request.add_messages();
  message->set_role("user");
  message->add_content()->set_text(argv[2]);
  request.mutable_sampling_params()->set_temperature(0);
  request.mutable_sampling_params()->set_max_tokens(32);

  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  if (argc > 3) {
    context.AddMetadata("authorization", std::string("Bearer ") + argv[3]);
  }
  auto stream = stub->Chat(&context, request);
  pagewire::v1::ChatResponse response;
  while (stream->Read(&response)) {
    for (const auto& choice : response.choices()) {
      std::cout << choice.content() << std::flush;
    }
  }
  std::cout << "\n";
  grpc::Status status = stream->Finish();
  if (!status.ok()) {
    std::cerr << status.error_code() << ": " << status.error_message() << "\n";
    return 1;
  }
  std::cout << response.usage().completion_tokens() << " tokens\n";
  return 0;
}
